"""Lets timm know of compact models once it is imported, so that `import hiap` need not wait for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["hiap_vit", "register"]


def hiap_vit(pretrained: bool = False, pretrained_cfg: Any = None, **options: Any) -> Any:
    """timm's entry point, for `timm.create_model("local-dir:FOLDER")`; the weights are always loaded."""
    from hiap.models.timm import entry_point
    from hiap.pruning.saving import load

    return entry_point(load, pretrained_cfg, **options)


def register() -> None:
    """Register `hiap_vit` with timm: now if it is imported already, else as soon as it is."""
    if "timm" in sys.modules:
        _add()
    else:
        sys.meta_path.insert(0, _Waiting())


def _add() -> None:
    from timm.models import register_model

    register_model(hiap_vit)


class _Waiting(MetaPathFinder):
    """Finds nothing itself: when timm is looked for, the finders behind it find it, and it is registered with after."""

    asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "timm" or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec("timm")
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_add(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _add()

            spec.loader.exec_module = run_and_add  # type: ignore[method-assign]
        return spec
