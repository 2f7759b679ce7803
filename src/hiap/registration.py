"""Lets timm and Transformers know of compact models once they are imported, so that `import hiap` need not wait."""

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
    from hiap.models.timm_entry import entry_point
    from hiap.pruning.merging import unmerged
    from hiap.pruning.saving import load

    return entry_point(lambda folder: unmerged(load(folder)), pretrained_cfg, **options)


def _add_to_timm() -> None:
    from timm.models import register_model

    register_model(hiap_vit)


def _add_configs() -> None:
    from hiap.models.transformers_configs import register_configs

    register_configs(_add_models)


def _add_models() -> None:
    from hiap.models.transformers_auto import register_models
    from hiap.pruning.rebuilding import restore

    register_models(restore)


# module of a library -> what to do as soon as it is imported
_LATER = {"timm": _add_to_timm, "transformers.models.auto.configuration_auto": _add_configs}


def register() -> None:
    """Register compact models with the libraries: now if they are imported already, else as soon as they are."""
    waiting = _Waiting()
    sys.meta_path.insert(0, waiting)
    waiting.tell()


class _Waiting(MetaPathFinder):
    """Finds nothing itself: modules of the libraries are found by the finders behind it, and told when they are ready.

    Modules of a library import each other in circles, so that one is ready when no import of the library is under way.
    """

    asking = False
    under_way = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.asking or fullname.partition(".")[0] not in {name.partition(".")[0] for name in _LATER}:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                self.under_way += 1
                try:
                    run(module)
                finally:
                    self.under_way -= 1
                self.tell()

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec

    def tell(self) -> None:
        """Register with what is ready, and leave when nothing is left to wait for."""
        for name in [name for name in _LATER if name in sys.modules and not self.under_way]:
            _LATER.pop(name)()
        if not _LATER and self in sys.meta_path:
            sys.meta_path.remove(self)
