"""Recovery: what it goes on with, and what it lets go."""

import copy
import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import hiap
from hiap.training.loop import Run, prune
from hiap.training.run_folder import RunError
from runs import TINY, noise_data, same, signalled, tiny


def stopped_and_resumed(
    tmp_path: Path, stop: int, model: torch.nn.Module | None = None, data: Any = None, **given: Any
) -> tuple[Any, Any]:
    """The results of a run left alone, and of one that was stopped before a step and resumed."""

    def run(name: str) -> Run:
        own = data or noise_data(512, 8)
        return Run(tiny(**given), tmp_path / name, (tmp_path / name).exists(), own, model=copy.deepcopy(model))

    whole, first = run("whole").go(), run("stopped")
    step = first.train_step
    first.train_step = lambda *batch: (signalled(first, stop), step(*batch))[1]
    with pytest.raises(KeyboardInterrupt):
        first.go()
    return whole, run("stopped").go()


@pytest.mark.slow
class TestResumedInRecovery:
    """Stopped after the freeze, a run goes on with a network that was never gated in this process."""

    @staticmethod
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return timm.create_model("vit_tiny_patch16_224", **{**TINY["model_args"], "num_classes": 10})

    @pytest.mark.parametrize("given", [{}, {"keep": "best"}])
    def test_metrics_of_every_epoch_are_the_same(self, given: dict[str, Any], tmp_path: Path) -> None:
        whole, again = stopped_and_resumed(tmp_path, 7, eval_every=1, epochs=6, **given)
        assert same(tmp_path / "whole", tmp_path / "stopped")
        assert whole.record.get("best") == again.record.get("best")

    def test_weights_that_were_frozen_stay_so(self, tmp_path: Path) -> None:
        model = self.model()
        for name, p in model.named_parameters():
            p.requires_grad_("attn" not in name)
        whole, again = stopped_and_resumed(tmp_path, 7, model, epochs=6)
        assert same(tmp_path / "whole", tmp_path / "stopped")
        flags = [{name: p.requires_grad for name, p in one.model.named_parameters()} for one in (whole, again)]
        assert flags[0] == flags[1] and not all(flags[0].values())

    @pytest.mark.parametrize("shrink", [True, False])
    def test_a_compact_model_remembers_where_it_came_from(self, shrink: bool, tmp_path: Path) -> None:
        model = self.model()
        compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 2], neurons=[40, 64]))
        stopped_and_resumed(tmp_path, 7, compact, epochs=6, shrink=shrink)
        one, two = (json.loads((tmp_path / name / "compact/config.json").read_text()) for name in ("whole", "stopped"))
        assert one == two and one["dense_macs"] == hiap.macs(model)


def test_data_that_ends_early_is_said(tmp_path: Path) -> None:
    data = noise_data(512, 8)
    train = data.train
    data.train = lambda *place: itertools.islice(train(*place), 1 - place[1])
    with pytest.raises(RunError, match="the training data ended after 1 of the 2 batches of an epoch"):
        prune(tiny(), tmp_path / "run", data=data)


def test_a_run_of_another_version_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    config = tiny(epochs=2)
    prune(config, tmp_path / "run", data=noise_data(512, 8))
    file = next((tmp_path / "run").glob("checkpoint-*")) / "state.json"
    state = json.loads(file.read_text())
    del state["format"]
    file.write_text(json.dumps(state))
    with pytest.raises(RunError, match="holds a run of another version of hiap"):
        prune(config, tmp_path / "run", resume=True, data=noise_data(512, 8))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_of_the_search_is_left_in_recovery(precision: str, tmp_path: Path) -> None:
    run = Run(tiny(dense_epochs=1, precision=precision, ema=0.9), tmp_path / "run", data=noise_data(512, 8))
    step, left = run.train_step, []

    def watched(*batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if run.phase.name == "search" and not left:
            left.extend(weakref.ref(one) for one in (run.phase.network, run.phase, run.phase.controller))
        if run.phase.name == "recover" and run.phase.step == 6:
            assert [one() for one in left] == [None] * 3
            left.append("seen")
        return step(*batch)

    run.train_step = watched
    run.go()
    assert left[-1] == "seen"
