import json
from pathlib import Path

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hiap
from conftest import images, make
from hiap.cli.main import main
from hiap.pruning.count import macs_of_widths
from hiap.speed.bench import Row, attention_backend, bench, dense_like, find_topology, table
from hiap.speed.clock import precision, timings
from hiap.speed.deployed import Speed, read_speeds, speeds
from test_cost import PAPER_TOPOLOGIES, giga

CPU = torch.device("cpu")


def row(network: str, ms: float, macs: int, mode: str = "eager") -> Row:
    return Row(network, "fp32", 256, mode, ms, 0.1, 256e3 / ms, macs, "flash")


def test_the_table_has_both_shares_of_the_mac_cut() -> None:
    rows = [row("dense", 100.0, 1760), row("compact", 45.0, 740)]
    rows += [row("dense", 90.0, 1760, "compile"), row("compact", 50.0, 740, "compile")]
    lines = table(rows, "dense").splitlines()
    assert "2.22x   93%  89%" in lines[2]  # against the dense model in the same mode
    assert "1.80x   76%  58%" in lines[4]
    best = lines[lines.index("each in its fastest mode:") + 1 :]
    assert "90.000" in best[0] and "2.00x   84%  73%" in best[1]  # either in its fastest


def test_every_setting_is_timed_side_by_side() -> None:
    model = make().float()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, None, 2], neurons=[8, 16, 24]))
    rows = bench({"dense": model, "compact": compact}, CPU, [1, 3], ["fp32", "bf16"], ["eager"], warmup=1, repeat=4)
    names = ["dense", "dense, optimised", "compact", "compact, optimised"]
    assert [(r.precision, r.batch, r.network) for r in rows] == [
        (p, b, name) for p in ("fp32", "bf16") for b in (1, 3) for name in names
    ]
    assert all(r.ms > 0 and r.images_per_s == pytest.approx(1e3 * r.batch / r.ms) for r in rows)
    assert {r.macs for r in rows} == {hiap.macs(model), hiap.macs(compact)}
    assert {p.dtype for one in (model, compact) for p in one.parameters()} == {torch.float32}


def test_calls_take_turns() -> None:
    calls: list[str] = []
    found = timings([lambda: calls.append("a"), lambda: calls.append("b")], CPU, warmup=1, repeat=6, rounds=3)
    assert "".join(calls) == "ab" + "aabb" * 3
    assert [len(times) for times in found] == [3, 3]


def test_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with precision("tf32") as dtype:
        assert dtype == torch.float32 and torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_wrong_settings_are_refused() -> None:
    for options, message in (
        ({"precisions": ["int8"]}, "unknown precision 'int8'"),
        ({"modes": ["fast"]}, "unknown mode 'fast'"),
        ({"modes": ["graph"]}, "need a CUDA device"),
        ({"batches": [0]}, "must be at least 1"),
        ({"repeat": 0}, "must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            bench({"dense": make()}, CPU, **options)
    with pytest.raises(ValueError, match="different inputs cannot be compared"):
        bench({"one": make(), "other": make(img_size=64)}, CPU)


@torch.no_grad()
def test_the_attention_kernel_is_named() -> None:
    model = make().float()
    assert attention_backend(model, images(model)) == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(model, images(model)) == "math"


def test_precision_beside_the_newer_way_to_set_it() -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has one way only")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with precision("fp32"):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("widths", [{}, {"mlp_ratio": 2.5}, {"embed_dim": 352, "num_heads": 11, "mlp_ratio": 2.228}])
def test_the_dense_model_is_built_again(widths: dict) -> None:
    model = make("deit_distilled", **widths)
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, None, 2], neurons=[8, 0, 24]))
    again = dense_like(compact)
    assert hiap.macs(again) == hiap.macs(model)
    assert {name: t.shape for name, t in again.state_dict().items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }
    twice = dense_like(hiap.extract(compact, hiap.Topology.from_counts(compact, neurons=[8, 0, 8])))
    assert hiap.macs(twice) == hiap.macs(model)
    with pytest.raises(ValueError, match="not a compact one"):
        dense_like(model)


@pytest.mark.slow
def test_the_papers_topologies_come_along() -> None:
    dense = timm.create_model("deit_base_patch16_224", num_classes=1000)
    for name, macs, padded in (("deit_base_10.1g", 10.08, 10.09), ("deit_base_7.4g", 7.43, 7.45)):
        topology = find_topology(name)
        heads, neurons = PAPER_TOPOLOGIES[macs]
        assert topology == hiap.Topology.from_counts(dense, heads=heads, neurons=neurons)
        for round_to, expected in ((1, macs), (8, padded)):
            widths = topology.widths(round_to)
            assert giga(macs_of_widths(dense, widths)) == expected
    with pytest.raises(ValueError, match=r"included topologies: deit_base_10\.1g, deit_base_7\.4g"):
        find_topology("deit_huge")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make("layer_scale").float()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 1, 2]))
    hiap.save(compact, tmp_path / "compact")
    folder, file = str(tmp_path / "compact"), tmp_path / "speed.json"
    quick = ["--batch", "2", "--device", "cpu", "--warmup", "1", "--runs", "2"]
    assert main(["bench", folder, "--json", str(file), *quick]) == 0
    assert "compact, optimised" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert [r["network"] for r in record["rows"]][:3] == ["dense", "dense, optimised", "compact"]
    assert record["rows"][0]["macs"] == hiap.macs(model) and record["options"]["batches"] == [2]
    assert main(["bench", folder, "--against", folder, *quick]) == 0
    assert main(["bench", folder, "--against", "none", *quick]) == 0
    assert main(["bench", *quick]) == 1
    assert "give either a folder, or both --model and --topology" in capsys.readouterr().err
    for wrong, message in (
        ([folder, "--img-size", "32"], "--img-size and --round-to go with --model"),
        (["--model", "m", "--topology", "t", "--against", "none"], "--against goes with a folder"),
        ([folder, "--json", folder], "cannot be written: it is a folder"),
        ([folder, "--device", "meta"], "--device must be cuda or cpu; found 'meta'"),
    ):
        assert main(["bench", *wrong]) == 1 and message in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", folder, "--device", "cuda"]) == 1
        assert "no CUDA device here" in capsys.readouterr().err


def test_the_speed_of_a_run_is_that_of_the_fastest_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make().float()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 1, 1], neurons=[8, 8, 8]))
    one, many = speeds(model, compact, torch.device("cpu"))
    assert (one.batch, many.batch, one.precision) == (1, 8, "fp32") and min(one.dense_ms, many.compact_ms) > 0
    forms = {"eager", "eager, optimised"}
    assert {one.dense_form, one.compact_form, many.dense_form, many.compact_form} <= forms

    def timed(networks: dict, device: object, batches: tuple, *rest: object) -> list[Row]:
        ms = {"dense": 4.0, "dense, optimised": 3.0, "compact": 1.5, "compact, optimised": 2.0}
        return [Row(n, "fp32", b, "eager", t * b, 0.0, 1.0, 1, "math") for b in batches for n, t in ms.items()]

    monkeypatch.setattr("hiap.speed.deployed.bench", timed)
    found = speeds(model, compact, torch.device("cpu"))
    assert found[0] == Speed(1, "fp32", 3.0, "eager, optimised", 1.5, "eager")
    assert found[0].comparison() == "2.00x faster"
    assert Speed(1, "fp32", 3.0, "eager", 3.1, "eager").comparison() == "not faster (0.97x)"
    assert (
        Speed(1, "fp32", 3.05, "eager", 3.0, "eager").comparison() == "not faster (1.02x)"
    )  # by 1.7 %, which is noise
    (tmp_path / "report.json").write_text(json.dumps({"speed": [speed.to_json() for speed in found]}))
    assert read_speeds(tmp_path / "report.json") == found and read_speeds(tmp_path / "none.json") == []


def test_fused_kernels_are_refused_where_they_do_not_run() -> None:
    text = r"^the fused kernels cannot run here: they need a CUDA device; found cpu\."
    with pytest.raises(hiap.InputError, match=text):
        bench({"dense": make()}, torch.device("cpu"), [1], ["fp32"], ["eager"], 1, 1, kernels=True)
