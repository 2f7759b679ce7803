"""Latency tables are measured, and fitted to whole networks."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hiap
from conftest import make
from hiap.budget.latency import LatencyCost, LatencyError, LatencyTable
from hiap.cli.main import main
from hiap.models.registry import widths_of
from hiap.nn.compact import Widths
from hiap.speed.clock import device_name
from hiap.speed.fitting import calibrate
from hiap.speed.measure import measure, network_costs
from test_latency import CPU, MODEL, synthetic


def test_a_table_is_calibrated_on_whole_networks() -> None:
    model, table = make(**MODEL), synthetic()
    cost, seen = LatencyCost(model, table), []

    def clock(network: torch.nn.Module) -> float:
        """Branches among others take 0.8 times as long as by themselves, and 0.25 more."""
        widths = widths_of(network)
        seen.append(widths)
        return whole(widths)

    def whole(widths: list[Widths]) -> float:
        branches = 0.8 * (cost.of_widths(model, widths) - table.outside)
        return table.outside + branches + 0.25 * sum(bool(w.heads) + bool(w.neurons) for w in widths)

    said: list[str] = []
    found = LatencyCost(model, calibrate(replace(table, dense=clock(model)), model, clock, said.append))
    assert said[-1] == "whole networks: the table is within 0.0% of those measured"
    assert len(seen) == 5 and len({tuple(widths) for widths in seen}) == 5
    for widths in seen:
        assert found.of_widths(model, widths) == pytest.approx(whole(widths))
    least = calibrate(replace(table, dense=1e-3), model, lambda network: 1e-3, said.append).ffn  # never nothing
    assert least[:2] == pytest.approx([0.108, 0.164])
    error = re.search(r"within (\d+)\.\d% of", said[-1])
    assert error and int(error[1]) > 1000


def test_the_clock_of_a_cpu_is_held_to_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine does, costs keep their ratios; short calls are timed more often than long ones."""
    module, machine, turns = sys.modules["hiap.speed.measure"], {"slow": 1.0}, []

    def timings(runs: list[Any], device: Any, warmup: int, repeat: int, rounds: int = 1) -> list[list[float]]:
        turns.append(repeat)
        return [[machine["slow"] * run() * (1 + turn) for turn in range(rounds)] for run in runs]

    monkeypatch.setattr(module, "timings", timings)
    clock = module._clock("ms", CPU, "eager", lambda: 2.0)
    assert clock(lambda: 10.0) == 10.0
    machine["slow"] = 1.5
    assert clock(lambda: 10.0) == pytest.approx(10.0) and clock(lambda: 0.5) == pytest.approx(0.5)
    assert clock(lambda: 100.0) == pytest.approx(100.0)
    assert turns == [1, 75, 1, 25, 1, 20, 1, 80, 1, 20]


def test_measuring(tmp_path: Path) -> None:
    model = make(**MODEL).float()
    table = measure(model, CPU, "fp32", 2, name="small")
    table.check()
    assert table.heads == [1, 2, 3, 4] and table.qk_dim == [8] and table.neurons[0] == 8 and table.neurons[-1] == 128
    assert (table.mode, table.dim, table.tokens) == ("eager", 32, 17)
    cost = LatencyCost(model, table, device_name(CPU), "fp32")
    assert 0.2 < (cost.outside + cost.dense) / table.dense < 5  # no clock is trusted here; research/latency.py is
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append("forward"))

    @contextmanager
    def alone() -> Iterator[None]:
        seen.append("begins")
        yield
        seen.append("ends")

    assert all(ms > 0 for ms in network_costs([model, model], CPU, table, alone=alone))
    assert seen[:2] == ["forward", "begins"] and seen[-1] == "ends" and seen.count("ends") == 2
    second = seen.index("ends") + 1  # the first call of a network, which may be compiled in it, is not timed
    assert seen[second : second + 2] == ["forward", "begins"]
    for mode in ("graph", "compile"):
        with pytest.raises(LatencyError, match=f"mode '{mode}' needs a CUDA device"):
            measure(model, CPU, "fp32", 2, mode=mode)
    with pytest.raises(LatencyError, match="reports no energy"):
        measure(model, CPU, "fp32", 2, unit="mJ")
    with pytest.raises(LatencyError, match="the model has gates"):
        measure(hiap.attach(model), CPU, "fp32", 2)


@pytest.mark.slow
def test_measuring_what_is_not_alike_in_all_blocks() -> None:
    dense = make(**MODEL).float()
    counts = {"heads": [None, 4, 1, 2], "neurons": [64, None, 24, 8]}
    compact = hiap.extract(dense, hiap.Topology.from_counts(dense, **counts))
    table = measure(compact, CPU, "fp32", 1)
    assert (table.heads[-1], table.neurons[-1]) == (4, 64)
    assert LatencyCost(compact, table).dense > 0
    tied = make(**MODEL, qk_norm=True).float()
    assert measure(tied, CPU, "fp32", 1, grid={"neurons": [128]}).qk_dim == [8]
    hollow = hiap.extract(dense, hiap.Topology.from_counts(dense, neurons=[None] * 4))
    with pytest.raises(LatencyError, match="no attention or no FFN"):
        measure(hollow, CPU, "fp32", 1)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.json"
    arguments = ["measure", "--model", "test_vit", "--device", "cpu", "--dtype", "fp32", "--batch", "1", "-o", str(out)]
    assert main(arguments) == 0
    assert LatencyTable.load(out).model == "test_vit" and "saved in" in capsys.readouterr().out
    assert main([*arguments, "--unit", "hours"]) == 1
    assert "unit must be one of ms, mJ" in capsys.readouterr().err
    for wrong, message in (
        (["--dtype", "int8"], "precision must be one of"),
        (["--model", "nosuch"], "timm cannot make the model nosuch"),
        (["--device", "gpu"], "--device must be cuda or cpu"),
        (["-o", str(tmp_path / "no/t.json")], "there is no folder"),
    ):
        assert main([*arguments, *wrong]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--batch", "0"])
    assert "must be a whole number from 1" in capsys.readouterr().err
