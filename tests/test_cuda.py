"""The same results on a GPU; skipped where there is none."""

import copy
import signal

import pytest
import timm
import torch

import hiap
from conftest import images, make
from hiap.pruning.attach import noise_source
from hiap.speed.bench import WAYS, bench
from hiap.speed.clock import device_name
from hiap.training.loop import Run
from runs import noise_data, tiny
from test_gates import ALL, scatter_logits

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extraction(dtype: torch.dtype, tmp_path) -> None:
    model = hiap.attach(make("layer_scale"), ALL).to("cuda", dtype)
    scatter_logits(model)
    compact = hiap.extract(model)
    assert {(p.device.type, p.dtype) for p in compact.parameters()} == {("cuda", dtype)}
    assert compact.hiap.logit_difference < 1e-12
    x = images(compact)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert (compact(x) - model(x)).abs().max() <= tolerance * model(x).abs().max()
    hiap.save(compact, tmp_path / "model")
    assert torch.equal(hiap.load(tmp_path / "model", "cuda")(x), compact(x))


def test_open_gates_are_bit_identical() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        dense = make("dinov2").to("cuda", dtype)
        assert torch.equal(hiap.attach(copy.deepcopy(dense), ALL)(images(dense)), dense(images(dense)))


def test_the_draw_depends_on_the_seed_alone() -> None:
    models = [hiap.attach(make().float(), seed=seed).cuda().train() for seed in (3, 3, 4)]
    torch.cuda.manual_seed(1)
    for model in models:
        noise_source(model).draw()
    first, second, third = (torch.cat([gate.noise for gate in hiap.gates(model)]) for model in models)
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_networks_are_timed_in_every_mode() -> None:
    model = make().float()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, None, 2], value_dims=[4, [], 8]))
    rows = bench({"dense": model, "compact": compact}, DEVICE, [2], ["fp32", "tf32", "bf16", "fp16"], WAYS, 1, 2)
    assert len(rows) == 4 * 4 * len(WAYS) and all(row.ms > 0 for row in rows)
    rows = bench({"compact": compact}, DEVICE, [2], ["fp32", "bf16"], WAYS, 1, 2, kernels=True)
    assert len(rows) == (2 + 3) * len(WAYS) and {row.network for row in rows if row.precision == "bf16"} == {
        *("compact", "compact, optimised", "compact, fused")
    }
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_kernels_compute_what_plain_pytorch_does(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 192, "depth": 4, "num_classes": 7}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, init_values=0.5).cuda().eval()
    counts = {"heads": [3, None, 0, 2], "qk_dims": [16, 0, 0, 24], "value_dims": [40, 0, 0, 64]}
    compact = hiap.extract(model, hiap.Topology.from_counts(model, **counts, neurons=[72, 0, 400, 256]))
    fused, plain = (hiap.optimize(compact, dtype, 32, kernels=kernels) for kernels in (True, False))
    assert [type(step).__name__ for step in fused.blocks] == ["Attend", *["FeedForward"] * 2, "Attend", "FeedForward"]
    x = images(compact, 32).cuda().to(dtype)
    with torch.inference_mode():
        exact = compact(x.float())
        off = [((net(x).float() - exact).abs().max() / exact.abs().max()).item() for net in (fused, plain)]
    assert off[0] < 2 * off[1] + torch.finfo(dtype).eps


@pytest.mark.parametrize("mode", ["eager", "graph", "compile"])
def test_a_table_is_measured_and_judges_a_run(mode: str, tmp_path) -> None:
    model = make(embed_dim=64, num_heads=4).float().to(DEVICE)
    table = hiap.measure(model, DEVICE, "bf16", 8, mode=mode)
    cost = hiap.LatencyCost(model, table, device_name(DEVICE), "bf16")
    assert 0.5 < (cost.outside + cost.dense) / table.dense < 2
    table.save(tmp_path / "table.json")
    assert hiap.LatencyTable.load(tmp_path / "table.json") == table


def test_energy_is_measured() -> None:
    pytest.importorskip("pynvml")
    grid = {"heads": [3], "qk_dim": [8], "value_dim": [8], "neurons": [96]}
    table = hiap.measure(make().float().to(DEVICE), DEVICE, "bf16", 64, unit="mJ", grid=grid)
    assert table.unit == "mJ" and table.dense > table.outside > 0


def test_a_run_on_the_gpu_can_be_stopped_and_resumed(tmp_path) -> None:
    given = {"precision": "bf16", "distill_features": 1.0, "ema": 0.9}
    runs = []
    for stop in (6, None):
        run = Run(tiny(**given), tmp_path / "run", stop is None, data=noise_data(512, 8))
        step = run.train_step

        def until(*batch: torch.Tensor, run=run, step=step, stop=stop) -> dict[str, torch.Tensor]:
            run.signals.number = signal.SIGINT if run.phase.step + 1 == stop else None
            return step(*batch)

        run.train_step = until
        runs.append(run)
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                run.go()
    result = runs[1].go()
    assert runs[1].context.device.type == "cuda" and {p.device.type for p in result.model.parameters()} == {"cuda"}
    assert hiap.macs(hiap.load(tmp_path / "run/compact")) <= 0.6 * result.record["dense_macs"]
    assert {p.device.type for p in runs[1].parts.model.parameters()} == {"cpu"}
