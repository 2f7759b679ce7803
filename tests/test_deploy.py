"""A target in time: the device of the run is measured, and the table kept."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hiap.budget.deploy import Deployment
from hiap.budget.latency import LatencyTable
from hiap.speed.clock import device_name
from hiap.training.config import read_config
from hiap.training.loop import Run, prune
from hiap.training.plan import plan
from hiap.training.run_folder import RunError
from runs import signalled
from test_latency import CPU, SHAPE, synthetic


def test_how_a_network_is_deployed() -> None:
    assert Deployment.parse(None, cuda=True) == Deployment("bf16", 256, "compile")
    assert Deployment.parse(None, cuda=False) == Deployment("fp32", 1, "eager")
    assert Deployment.parse("64, graph", cuda=True) == Deployment("bf16", 64, "graph")
    assert Deployment.parse("torch,eager,fp16,8", cuda=False) == Deployment("fp16", 8, "eager")
    assert Deployment.parse("onnx", cuda=True) == Deployment("fp32", 1, "eager", "onnx")
    assert Deployment.parse("fp16,openvino,4", cuda=False) == Deployment("fp16", 4, "eager", "openvino")
    with pytest.raises(ValueError, match=r"^deploy 'onnx,graph': graph is a mode of torch; leave it out$"):
        Deployment.parse("onnx,graph", cuda=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device of the run is a GPU here")
def test_a_target_in_time_measures_the_device_once_and_keeps_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, calls = synthetic(dim=16, tokens=5, device=device_name(CPU), precision="fp32", batch=2, mode="eager"), []

    def measured(model: Any, device: Any, *how: Any, say: Any, other: Any) -> LatencyTable:
        assert other is None  # torch itself
        calls.append(how)
        return replace(own, outside=float(len(calls)))  # no two measurements are the same

    monkeypatch.setattr("hiap.training.costs.measure", measured)
    given = {"model_args": SHAPE, "dense_epochs": 0, "epochs": 2, "target": "1.3x", "deploy": "2"}
    config = read_config("digits", {**given, "checkpoint_every": 2})
    run = Run(config, tmp_path / "run")
    step = run.train_step
    run.train_step = lambda *batch: (signalled(run, 3), step(*batch))[1]
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert LatencyTable.load(tmp_path / "run/latency.json").outside == 1.0
    assert "fp32, batch 2, eager" in capsys.readouterr().out
    result = prune(config, tmp_path / "run", resume=True)
    assert calls == [("fp32", 2, "ms", "eager", "vit_tiny_patch16_224")]
    assert result.record["predicted"] <= result.record["dense_predicted"] / 1.3
    assert "attention" in run.parts.kinds and result.record["measured"] > 0
    replace(own, outside=3.0).save(tmp_path / "run/latency.json")
    with pytest.raises(RunError, match=r"latency\.json, which the run has measured, is missing or has changed"):
        prune(config, tmp_path / "run", resume=True)
    assert any(
        re.fullmatch(r"reach    .* to 100% of the dense cost, .* ms, from .* ms on", one) for one in plan(config)
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device of the run is a GPU here")
def test_a_target_in_time_needs_no_preparation(tmp_path: Path) -> None:
    config = read_config("digits", {"model_args": SHAPE, "dense_epochs": 0, "epochs": 1, "target": "1.1x"})
    record = prune(config, tmp_path / "run").record
    table = LatencyTable.load(tmp_path / "run/latency.json")
    assert (table.device, table.precision, table.batch, table.mode) == (device_name(CPU), "fp32", 1, "eager")
    assert record["predicted"] <= record["dense_predicted"] / 1.1
