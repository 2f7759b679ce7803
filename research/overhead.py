"""What gates cost in training, and what the shrink gives back: time and peak memory of a step, side by side.

    python research/overhead.py [--model deit_small_patch16_224] [--batch 256] [--teacher regnety_160] [--json FILE]

Random images and weights (speed does not depend on them), bf16 autocast, AdamW, the budget control included (importance
observed every step, logits projected every 100). The teacher is timed by itself. The compact network has half the MACs.
From the step times follow the GPU-hours of a 300-epoch ImageNet run, without the time to load data and to exchange
gradients.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from timm.optim import create_optimizer_v2

import hiap
from hiap.budget.controller import Controller

IMAGENET, EPOCHS, BATCH, FREEZE = 1_281_167, 300, 256, 0.3
PROJECT_EVERY = 100


def step_of(kind: str, name: str, batch: int, device: torch.device) -> tuple[Callable[[], None], torch.nn.Module]:
    """A training step of the dense, gated or compact model."""
    torch.manual_seed(0)
    model = timm.create_model(name).to(device).train()
    controller = None
    if kind != "dense":
        dense = hiap.macs(model)
        hiap.attach(model)
        controller = Controller(model, hiap.MacCost(model), 0.5 * dense)
        controller.gradient.normal_(generator=torch.Generator(device).manual_seed(0))
        controller.observe()
    if kind == "compact":
        model, controller = hiap.extract(model, controller.decide()).train(), None
    optimizer = create_optimizer_v2(hiap.weight_groups(model), opt="adamw", lr=1e-4)
    x = torch.randn(batch, 3, 224, 224, device=device)
    y = torch.randint(0, 1000, (batch,), device=device)
    count = 0

    def step() -> None:
        nonlocal count
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if controller is not None:
            controller.observe()
            if count % PROJECT_EVERY == 0:
                controller.project(controller.dense_cost, 2.0)
        count += 1

    return step, model


def timed(step: Callable[[], None], repeat: int, device: torch.device) -> float:
    """Mean seconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeat


def measure(name: str, batch: int, device: torch.device, rounds: int, repeat: int) -> dict[str, dict[str, float]]:
    result = {}
    for kind in ("dense", "gated", "compact"):  # memory first, each alone on the device
        if device.type == "cuda":
            step, model = step_of(kind, name, batch, device)
            for _ in range(2):
                step()
            torch.cuda.reset_peak_memory_stats()
            step()
            result[kind] = {"gib": torch.cuda.max_memory_allocated() / 2**30}
            del step, model
            gc.collect()
            torch.cuda.empty_cache()
        else:
            result[kind] = {"gib": float("nan")}
    steps = {}
    for kind in result:
        steps[kind], model = step_of(kind, name, batch, device)
        result[kind]["macs"] = hiap.macs(model)
        timed(steps[kind], 5, device)
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):  # interleaved, so that a slow moment meets all alike
        for kind, step in steps.items():
            times[kind].append(timed(step, repeat, device))
    for kind in steps:
        result[kind]["ms"] = 1e3 * statistics.median(times[kind])
        result[kind]["spread_ms"] = 1e3 * (max(times[kind]) - min(times[kind]))
    return result


@torch.no_grad()
def teacher_ms(name: str, batch: int, device: torch.device, repeat: int) -> float:
    model = timm.create_model(name).to(device).eval()
    x = torch.randn(batch, 3, 224, 224, device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            model(x)

    timed(step, 5, device)
    return 1e3 * timed(step, repeat, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--teacher", default="regnety_160")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = measure(options.model, options.batch, device, options.rounds, options.repeat)
    dense = result["dense"]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{options.model}, batch {options.batch}, bf16, {where}, torch {torch.__version__}")
    for kind, row in result.items():
        print(
            f"{kind:8} {row['ms']:8.2f} ms ({row['ms'] / dense['ms']:.3f}x, spread {row['spread_ms']:.2f})  "
            f"{row['gib']:6.2f} GiB ({row['gib'] / dense['gib']:.3f}x)  {row['macs'] / 1e9:.2f} G MACs"
        )
    teacher = teacher_ms(options.teacher, options.batch, device, options.repeat)
    steps = EPOCHS * (IMAGENET // BATCH) * BATCH / options.batch
    gated, compact = result["gated"]["ms"] + teacher, result["compact"]["ms"] + teacher
    whole = steps * gated / 3.6e6
    shrunk = steps * (FREEZE * gated + (1 - FREEZE) * compact) / 3.6e6
    print(f"teacher  {teacher:8.2f} ms ({options.teacher}, forward)")
    print(f"ImageNet, {EPOCHS} epochs: {whole:.0f} GPU-hours, {shrunk:.0f} with the shrink at {FREEZE:.0%}")
    record = {"options": {k: str(v) for k, v in vars(options).items()}, "steps": result, "teacher_ms": teacher}
    if options.json:
        options.json.write_text(json.dumps(record | {"hours": whole, "hours_shrunk": shrunk, "device": where}) + "\n")


if __name__ == "__main__":
    main()
