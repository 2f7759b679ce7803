"""Networks on fused kernels: how fast they are, and how near each kernel is to the limits of the device.

    python research/roofline.py [--start vit_tiny] [--records research/records/compare.jsonl] [--methods hiap,taylor]
        [--target 50%] [--batch 256] [--tflops 989 --gbytes 4800] [--json FILE]

Needs a CUDA device with Triton. Takes the network of the last run of each method at a target, with the usual options
and random weights (speed ignores them), and times it in bf16 beside timm's dense model, compiled: optimised, and on
fused kernels. Then every kernel of the first method's network is timed by itself. Its limit is the greater of two
times: its operations at the peak of the matrix units, and the activations that it must read and write at the bandwidth
of the memory. The defaults are those of an H200. A kernel is called several times in a row, so a part of its input may
come from the cache.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import hiap
from hiap.speed.clock import graphed, timings
from hiap.speed.steps import Attend, FeedForward, First
from prune_tiny_imagenet import STARTS
from record import network_of, read
from tiny_imagenet import CLASSES

REPEATED = 8  # calls of a kernel in one CUDA graph
Kernel = tuple[str, Callable[[], Tensor], float, float]  # its name, a call, operations and bytes


def networks(options: argparse.Namespace, dense: nn.Module) -> dict[str, nn.Module]:
    """The dense model, and the network of the last finished run of every method."""
    found = {"dense": dense}
    for method in options.methods.split(","):
        own = [
            record
            for record in read(options.records)
            if (record.start, record.method, record.target) == (options.start, method, options.target)
            and (record.set, record.like, record.final) == ("", None, True)
            and record.widths
        ]
        if not own:
            raise SystemExit(f"{options.records} has no finished run of {method} at {options.target}")
        found[method] = network_of(own[-1].widths, dense)
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    device = torch.device("cuda")
    run = graphed(lambda: [call() for _ in range(REPEATED)], device)
    return statistics.median(timings([run], device, 3, 30)[0]) / REPEATED


def kernels(network: nn.Module, x: Tensor) -> Iterator[Kernel]:
    """Every kernel of the blocks, on the input that it has in the network."""
    for step in network.blocks:
        rows, size = x.numel() // x.shape[-1], x.element_size()
        if isinstance(step, First):
            x = step(x)
            continue
        y = step(x)
        out, written = y.numel() // y.shape[-1], x.numel() + y.numel()
        if isinstance(step, Attend):
            qkv = step.qkv(x)
            o = step.attend(qkv, step.tile)
            inner, width = step.qkv.weight.shape
            yield "norm + qkv", lambda s=step, x=x: s.qkv(x), 2 * rows * inner * width, size * (x.numel() + qkv.numel())
            pairs = out * x.shape[1] * step.heads
            operations = 2 * pairs * (step.qk_dim + step.value_dim)
            yield "attention", lambda s=step, q=qkv: s.attend(q, s.tile), operations, size * (qkv.numel() + o.numel())
            first = x[:, : y.shape[1]].contiguous()
            operations = 2 * out * step.out.weight.numel()
            moved = size * (o.numel() + 2 * y.numel())
            yield "projection + residual", lambda s=step, o=o, x=first: s.out(o, x), operations, moved
        elif isinstance(step, FeedForward):
            operations = 2 * rows * (step.fc1.weight.numel() + step.out.weight.numel())
            if step.tile is not None:
                yield "norm + FFN + residual", lambda s=step, x=x: s(x), operations, size * written
            else:
                hidden = step.fc1(x)
                half, moved = operations / 2, size * hidden.numel()
                yield "norm + fc1 + GELU", lambda s=step, x=x: s.fc1(x), half, size * x.numel() + moved
                yield "fc2 + residual", lambda s=step, h=hidden, x=x: s.out(h, x), half, size * written + moved
        x = y  # of other steps nothing is known


def limits(network: nn.Module, x: Tensor, tflops: float, gbytes: float) -> list[dict[str, Any]]:
    """Time and limit of all kernels of a name, in microseconds."""
    found: dict[str, dict[str, Any]] = {}
    for name, call, operations, moved in kernels(network, x):
        empty = {"us": 0.0, "compute_us": 0.0, "memory_us": 0.0, "limit_us": 0.0}
        row = found.setdefault(name, {"kernel": name, "count": 0, **empty})
        compute, memory = operations / (1e6 * tflops), moved / (1e3 * gbytes)
        row["count"] += 1
        row["us"] += 1e3 * milliseconds(call)
        row["compute_us"] += compute
        row["memory_us"] += memory
        row["limit_us"] += max(compute, memory)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records/compare.jsonl")
    parser.add_argument("--methods", default="hiap,taylor", help="the first one is taken apart")
    parser.add_argument("--target", default="50%")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of the device in bf16")
    parser.add_argument("--gbytes", type=float, default=4800.0, help="bandwidth of its memory, per second")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    name, size, _ = STARTS[options.start]
    dense = timm.create_model(name, img_size=size, num_classes=CLASSES).to(device).eval()
    images = torch.randn(options.batch, 3, size, size, device=device, dtype=dtype)
    nets, runs, fast = networks(options, dense), {}, {}
    with torch.inference_mode():
        for key, net in nets.items():
            fast[key] = hiap.optimize(net, dtype, options.batch, kernels=True)
            forms = {"": copy.deepcopy(net).to(dtype), ", optimised": hiap.optimize(net, dtype, options.batch)}
            for form, model in {**forms, ", fused": fast[key]}.items():
                run = hiap.compiled(model)
                runs[key + form] = graphed(lambda run=run: run(images), device)
        times = dict(zip(runs, map(statistics.median, timings(list(runs.values()), device, 10, 100)), strict=True))
        first = fast[options.methods.split(",")[0]]
        rows = limits(first, first.stem(images), options.tflops, options.gbytes)
    cost = {key: hiap.macs(net) for key, net in nets.items()}
    for key, ms in times.items():
        ratio, cut = times["dense"] / ms, cost["dense"] / cost[key.split(",")[0]]
        print(f"{key:24} {ms:7.3f} ms  {ratio:5.2f}x of compiled timm, {ratio / cut:4.0%} of the MAC cut of {cut:.2f}x")
    print("\nkernel                    count      us  compute limit  memory limit  of its limit")
    for row in rows:
        print(
            f"{row['kernel']:24} {row['count']:6} {row['us']:7.1f} {row['compute_us']:14.1f} {row['memory_us']:13.1f} "
            f"{row['limit_us'] / row['us']:13.0%}"
        )
    if options.json:
        given = {key: str(value) for key, value in vars(options).items()}
        where = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
        options.json.write_text(json.dumps({**where, "options": given, "ms": times, "kernels": rows}) + "\n")


if __name__ == "__main__":
    main()
