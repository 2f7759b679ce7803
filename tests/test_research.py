"""The comparisons: every method ends at the budget, records continue where they stopped, and outsiders get the data."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import bookkeeping
import compare
import forwards
import hiap
import outcome
from conftest import grey_photos
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.data.sources import Augmentation, ByteData
from hiap.models.registry import sites
from hiap.nn.compact import Widths
from hiap.speed.clock import device_name
from hiap.training.config import read_config
from methods import LEARNED, PEERS, Peer, from_scratch, gated_run, missed
from narrower import counted_macs
from prune_tiny_imagenet import configuration, tenths

SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 5}
HALF = ((0.5,) * 3, (0.5,) * 3)
UNIT = 8 * 2 * 17 * 32  # eight neurons


@pytest.fixture
def start(tmp_path: Path):
    torch.manual_seed(7)
    model = timm.create_model("vit_tiny_patch16_224", **SHAPE)
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    given = {"weights": str(tmp_path / "dense.safetensors"), "target": "60%", "epochs": 2, "batch_size": 32}
    given |= {"model": "vit_tiny_patch16_224", "model_args": SHAPE, "lr": 1e-3, "freeze_at": 0.5, "eval_every": 9}
    given |= {"distill_features": 0.0}  # as all methods have it
    images = torch.randint(0, 255, (96, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(96) % 5
    half = (images[:32], labels[:32])
    data = ByteData((images, labels), half, (16, 16), HALF, Augmentation(), torch.device("cpu"), 0, list("abcde"))
    return given, data


@pytest.mark.slow
def test_tenths_are_split_and_varied_as_asked(tmp_path: Path) -> None:
    """The last tenth is held out, or all ten are trained on; crop and flip are the configuration's."""
    for i, name in enumerate([*(f"train_{k}" for k in range(10)), "val"]):
        ramp = torch.arange(64, dtype=torch.uint8) + 10 * i
        pixels = ramp.view(1, 1, 64, 1).expand(200 * 64, 2, 64, 3).flatten(1, 2)
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{name}.jpg", quality=95)
    given = {"crop": 1.0, "flip": 0.0, "img_size": 64}
    for final, trained, scored in ((False, 9, 9), (True, 10, 10)):
        config = configuration("vit_tiny", None, given)
        data = tenths(tmp_path, config, final, torch.device("cpu"), 1)
        assert (data.train_size, data.val_size, data.classes) == (200 * trained, 200, 200)
        more = tenths(tmp_path, config, final, torch.device("cpu"), 1, scored=2)
        assert (more.train_size, more.val_size) == (200 * trained, 400)
        (x, y), (val, labels) = next(data.train(0, 0, 200 * trained, 0, 1)), next(data.val(200))
        assert labels.tolist() == list(range(200)) and y.bincount().tolist() == [trained] * 200
        left = ((val[:, :, :, 0] * 0.5 + 0.5) * 255).mean()
        assert abs(left - 10 * scored) < 2
        first = ((x[:, :, :, 0] * 0.5 + 0.5) * 255).mean(dim=(1, 2))
        assert sorted({round(float(one) / 10) for one in first}) == list(range(trained))
    flipped = tenths(tmp_path, configuration("vit_tiny", None, given | {"flip": 1.0}), True, torch.device("cpu"), 1)
    torch.testing.assert_close(next(flipped.train(0, 0, 2000, 0, 1))[0], x.flip(-1), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", PEERS)
def test_peers_meet_the_budget(method: str, start, tmp_path: Path) -> None:
    given, data = start
    given |= {"round_to": 2} if method == "torch_pruning_aligned" else {}  # in eights the package takes all 8 dims
    peer = Peer(read_config(None, given), tmp_path / "run", data, PEERS[method])
    network = peer.train()
    target = 0.6 * peer.dense_macs
    assert (
        target - max(UNIT, 0.01 * target, ("torch" in method) * 0.05 * target) < counted_macs(network, peer) <= target
    )
    if "torch" not in method:
        assert hiap.macs(network) == counted_macs(network, peer)
    assert 0 <= peer.record["top1"] <= 100 and peer.record["course"]["recover"]["epochs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", LEARNED)
def test_penalised_gates_are_cut_to_the_budget(method: str, start, tmp_path: Path) -> None:
    given, data = start
    given |= {"gate_mode": "gradient", "granularities": ["head", "ffn", "value_dim", "neuron"], "gate_lr": 0.1}
    run = gated_run(method, read_config(None, given), tmp_path / "run", data)
    run.begin()
    assert missed(run.phase) == 1  # all is open
    for gate in hiap.gates(run.phase.network):
        gate.logit.data.fill_(-8.0)
    assert missed(run.phase) == 0
    run = gated_run(method, read_config(None, given), tmp_path / "whole", data)
    result = run.go()
    target = 0.6 * run.parts.dense_macs
    assert target - max(UNIT, 0.01 * target) < hiap.macs(result.model) <= target
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    names = {"l1": {"l1"}, "paper": {"macro", "micro", "feasible_head", "feasible_dim", "feasible_ffn"}}[method]
    assert names <= lines[0].keys() and not names & lines[-1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("features", [0.0, 10.0])
def test_compiled_steps_train_the_same_network(
    features: float, start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a peer and of HiAP after its search; with a backend that runs the traced operations as they are."""
    given, data = start
    given |= {"distill_features": features}
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    peers, runs = [], []
    for faster in (False, True):
        peers.append(Peer(read_config(None, given), tmp_path / f"peer {faster}", data, PEERS["taylor"], faster).train())
        run = gated_run("hiap", read_config(None, given), tmp_path / f"hiap {faster}", data, faster=faster)
        runs.append(run.go().model)
        assert len(traced) == 2 * faster  # one network each, and it is never traced again
    for plain, compiled in (peers, runs):
        plain, compiled = plain.state_dict(), compiled.state_dict()
        for name, weight in plain.items():
            torch.testing.assert_close(compiled[name], weight, atol=1e-6, rtol=1e-5)


def test_widths_from_scratch_have_other_weights(start, tmp_path: Path) -> None:
    given, data = start
    peer = Peer(read_config(None, given), tmp_path / "run", data, lambda run: from_scratch(run, widths))
    widths = [Widths(1, 8, 8, 8), Widths(2, 8, 8, None), Widths(None, 0, 0, 24), Widths(4, 8, 8, 32)]
    network = peer.make(peer)
    assert [site.widths for site in sites(network)] == widths
    assert not torch.equal(network.patch_embed.proj.weight, peer.dense.patch_embed.proj.weight)


@pytest.mark.slow
def test_backbones_are_compared_by_their_nearest_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grey_photos(tmp_path / "data", 16)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", img_size=32, num_classes=0).state_dict(), tmp_path / "dense.safetensors")
    own = ["--data", tmp_path / "data", "--weights", tmp_path / "dense.safetensors", "--model", "test_vit"]
    own += ["--img-size", 32, "--records", tmp_path / "records.jsonl", "--epochs", 1, "--methods", "hiap,taylor"]
    own += ["--seeds", 0, "--rates", "1e-4"]
    for pair in ("objective=features", "precision=fp32", "data_device=cpu", "workers=0", "batch_size=16"):
        own += ["--set", pair]
    monkeypatch.setattr(sys, "argv", ["compare.py", "run", *map(str, own)])
    monkeypatch.setattr(compare, "_DATA", {})
    compare.main()
    hiap_record, taylor = (json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines())
    assert hiap_record["dense_top1"] == taylor["dense_top1"] > 50  # grey levels are easy; chance is a third
    assert all(record["macs"] <= 0.5 * record["dense_macs"] for record in (hiap_record, taylor))
    assert "top1_before" in taylor and min(hiap_record["error"], taylor["error"]) > 0
    monkeypatch.setattr(sys, "argv", ["compare.py", "run", *map(str, own), "--methods", "torch_pruning_taylor"])
    with pytest.raises(SystemExit, match="objective=features does not go with Torch-Pruning"):
        compare.main()
    monkeypatch.setattr(sys, "argv", ["compare.py", "run", *map(str, own), "--compile"])
    with pytest.raises(SystemExit, match="--compile does not go with objective=features"):
        compare.main()


@pytest.mark.slow
def test_a_comparison_is_run_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grey_photos(tmp_path / "data", 24)
    model = timm.create_model("test_vit", img_size=32, num_classes=3)
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    own = ["--data", tmp_path / "data", "--weights", tmp_path / "dense.safetensors", "--model", "test_vit"]
    own += ["--img-size", 32, "--records", tmp_path / "records.jsonl", "--epochs", 2, "--methods", "hiap,taylor"]
    own += ["--seeds", 1, "--rates", "1e-3,1e-4"]
    for pair in ("precision=fp32", "data_device=cpu", "workers=0", "batch_size=16"):
        own += ["--set", pair]

    def called(command: str, *more: str | Path) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["compare.py", command, *map(str, [*own, *more])])
        monkeypatch.setattr(compare, "_DATA", {})
        compare.main()
        return [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]

    methods, epoch_s = ("hiap", "taylor"), bookkeeping.epoch_seconds
    (tmp_path / "list.txt").write_text(
        "run --held-out --methods taylor # rates\nrun --held-out --methods hiap\nwait\nrun\n"
    )
    records = called("batch", "--list", tmp_path / "list.txt", "--jobs", "2")
    assert sorted((r["method"], r["final"], r["lr"]) for r in records[:4]) == [
        (a, False, r) for a in methods for r in (1e-4, 1e-3)
    ]
    assert [(r["method"], r["final"]) for r in records[4:]] == [(method, True) for method in methods]
    best = max((r for r in records[:4] if r["method"] == "hiap"), key=lambda record: record["top1"])["lr"]
    assert records[4]["lr"] == best and all(r["macs"] <= 0.5 * r["dense_macs"] for r in records)
    parts, searches = [], []
    monkeypatch.setattr(compare, "projection_interval", lambda steps: searches.append(steps) or 1)
    monkeypatch.setattr(compare, "CLOCKED", 2)  # of the four steps of an epoch
    monkeypatch.setattr(outcome, "epoch_seconds", lambda lines, longer: parts.append(longer) or epoch_s(lines, longer))
    records = called("clock")
    assert parts == [2.0, 2.0] and searches == [1]  # 15 % of two epochs, not half of six
    assert [(r["method"], r["final"], sorted(r["epoch_s"])) for r in records[6:]] == [
        ("hiap", "clock", ["recover", "search"]),
        ("taylor", "clock", ["recover"]),
    ]
    more = called("run", "--like", "hiap", "--rates", "1e-3")[len(records) :]
    assert [(r["method"], r["like"]) for r in more] == [("taylor", "hiap 2")]
    built = []
    optimize = forwards.optimize
    monkeypatch.setattr(
        forwards, "optimize", lambda network, *how, **more: built.append(network) or optimize(network, *how, **more)
    )
    for _ in range(2):  # all of them again: times are compared side by side
        found = called("speed")[-2:]
        assert [(r["method"], r["final"], r["mode"]) for r in found] == [
            (method, "speed", "eager") for method in methods
        ]
        assert found[0]["dense_ms"] == found[1]["dense_ms"] > 0 and min(r["ms"] for r in found) > 0
    assert [[vars(site.widths) for site in sites(network)] for network in built[1:3]] == [
        record["widths"] for record in records[4:6]
    ]
    tried = called("run", "--methods", "taylor", "--trial-epochs", "1", "--seeds", "7")[-3:]
    assert [(r["epochs"], r["final"], r.get("trial_epochs")) for r in tried] == [(1, False, None)] * 2 + [(2, True, 1)]
    with (tmp_path / "records.jsonl").open("a") as file:  # as those of Torch-Pruning, whose networks are made again
        file.write(json.dumps(records[5] | {"method": "depth", "widths": None}) + "\n")
    records = called("speed", "--methods", "depth")
    assert records[-1]["ms"] > 0
    capsys.readouterr()
    assert called("times", "--methods", "taylor,depth", "--target", "40%,70%") == records  # nothing is trained
    lines = [
        re.fullmatch(r"(\w+) (\d+%): \d+\.\d+ ms, \d+\.\d+x", line) for line in capsys.readouterr().out.split("\n")[:-1]
    ]
    assert [line and line.groups() for line in lines] == list(product(("taylor", "depth"), ("40%", "70%")))
    dense = {"heads": 2, "qk_dim": 32, "value_dim": 32, "neurons": 192}
    grid = {name: [8, width] if name != "heads" else [1, width] for name, width in dense.items()}
    ms = {"attention": [[[1.0, 1.1], [1.1, 1.2]], [[1.3, 1.4], [1.4, 1.5]]], "ffn": [1.0, 2.0], "outside": 1.0}
    own_time = {
        "unit": "ms",
        "device": device_name(torch.device("cpu")),
        "precision": "fp32",
        "batch": 8,
        "mode": "eager",
        "model": "test_vit",
    }
    table = LatencyTable(**own_time, **grid, **ms, dim=64, tokens=5, dense=22.0)
    table.save(tmp_path / "table.json")
    monkeypatch.setattr("shared.measure_error", lambda *_: 1.02)
    cost = ("--cost", tmp_path / "table.json", "--target", "1.4x", "--rates", "1e-3", "--methods")
    record, peer = called("run", *cost, "hiap_time,depth", "--keep", tmp_path / "kept")[-2:]
    folder = tmp_path / "kept/hiap_time_1.4x_lr_0.001_seed_1"
    assert "measured" not in json.loads((folder / "report.json").read_text())  # runs may share the device
    kept = hiap.load(folder / "compact")
    assert [vars(site.widths) for site in sites(kept)] == record["widths"]
    assert record["table_error"] == peer["table_error"] == 1.02
    tried = called("run", *cost, "hiap_time,depth", "--held-out", "--rates", "2e-3")[-2:]
    assert [(one["final"], one.get("table_error")) for one in tried] == [(False, None)] * 2  # these trust the table
    assert record["method"] == "hiap_time" and re.fullmatch(r"1\.4x by table\.json [0-9a-f]{8}", record["target"])
    model = timm.create_model("test_vit", img_size=32)
    known = LatencyCost(model, table)
    took = known.of_widths(model, [Widths(**one) for one in peer["widths"]]) / (known.outside + known.dense)
    assert peer["method"] == "depth" and 0.6 / 1.4 < took <= 1 / 1.4
    found = called("speed", *cost, "hiap_time")[-1]
    assert [found[name] for name in ("target", "batch", "mode")] == [record["target"], 8, "eager"]


@pytest.mark.slow
def test_networks_are_timed_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another runtime, in one that torch has, and nowhere but on the device of the table."""
    dense = timm.create_model("test_vit", img_size=32, num_classes=3).eval()
    table = LatencyTable.load(Path(__file__).parents[1] / "research/records/vit_tiny_cpu_onnx.json")
    here = replace(table, device=device_name(torch.device("cpu")))
    how = forwards.Forward.of(here)
    assert (how.mode, how.batch, how.precision, how.by_torch) == ("onnx", 1, "fp32", False)
    found = how.times({"dense": dense}, {"pruned": dense})
    assert sorted(found) == ["dense", "pruned"] and min(found.values()) > 0
    eager = forwards.Forward.of(replace(here, runtime="torch"))
    assert (eager.mode, eager.by_torch) == ("eager", True)
    monkeypatch.setattr(forwards, "timings", lambda runs, *rest: [[5.0], [3.0], [2.0], [4.0]][: len(runs)])
    both = eager.times({"dense": dense, "narrower": dense}, {"narrower": dense, "pruned": dense})
    assert both == {"dense": 5.0, "narrower": 2.0, "pruned": 4.0}  # the faster of two forms
    with pytest.raises(ValueError, match="the device of the table, NVIDIA H200; found cpu"):
        forwards.Forward.of(replace(table, device="NVIDIA H200"))


def test_an_epoch_is_timed_by_the_fastest() -> None:
    lines = [{"stage": stage, "seconds": s} for stage, s in (("search", 3.0), ("search", 2.0), ("recover", 1.5))]
    assert bookkeeping.epoch_seconds(lines, 4.0) == {"search": 8.0, "recover": 6.0}


@pytest.mark.slow
def test_peers_may_have_aligned_heads(start, tmp_path: Path) -> None:
    given, data = start
    turned = []
    for align in (False, True):
        config = read_config(None, given | {"align_heads": align})
        peer = Peer(config, tmp_path / str(align), data, PEERS["taylor_five"])
        before = peer.dense.blocks[0].attn.qkv.weight.clone()
        peer.train()
        turned.append(not torch.equal(before, peer.dense.blocks[0].attn.qkv.weight))
    assert turned == [False, True]
