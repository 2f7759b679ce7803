"""Clocks for networks and parts of networks: precisions, CUDA graphs, calls that take turns."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

__all__ = ["DTYPES", "Alone", "Call", "device_name", "graphed", "materialise", "precision", "timings"]

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Alone = Callable[[], AbstractContextManager[None]]  # keeps others off the device
Call = Callable[[], Any]
Module = TypeVar("Module", bound=nn.Module)


def device_name(device: torch.device) -> str:
    """The device in words: the GPU's own name, or the processor with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"


@torch.no_grad()
def materialise(model: Module, device: torch.device) -> Module:
    """Give a network random weights on a device, to be timed: speed does not depend on them. Constants stay."""
    constants = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for p in model.parameters():
        p.normal_(std=0.02)
    for name, buffer in model.named_buffers():
        buffer.copy_(constants.get(name, torch.zeros_like(buffer)))  # what is left in memory may be no number
    return model


@contextmanager
def precision(name: str) -> Iterator[torch.dtype]:
    """The dtype of a precision, with TensorFloat-32 on for `tf32` and off for all else."""
    tf32, matmul, cudnn = name == "tf32", cast(Any, torch.backends.cuda.matmul), cast(Any, torch.backends.cudnn)
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # who has set it the way that came with torch 2.9 is refused the older one
        newer = matmul.fp32_precision, cudnn.conv.fp32_precision
        matmul.fp32_precision = cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield DTYPES[name]
        finally:
            matmul.fp32_precision, cudnn.conv.fp32_precision = newer
        return
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32 = tf32
    try:
        yield DTYPES[name]
    finally:
        torch.set_float32_matmul_precision(older[0])
        cudnn.allow_tf32 = older[1]


def graphed(run: Call, device: torch.device) -> Call:
    """The kernels of a call as one CUDA graph of a device. What the call needs lives as long as the graph."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a loader may be pinning memory
            run()

    def replay(kept: Call = run) -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


def timings(
    runs: Sequence[Call], device: torch.device, warmup: int, repeat: int, rounds: int = 10
) -> list[list[float]]:
    """Milliseconds of each call: for every round its mean over the calls of the round; the calls take turns.

    Args:
        warmup: untimed calls of each.
        repeat: timed calls of each over all rounds, at least.
    """
    for run in runs:
        for _ in range(warmup):
            run()
    rounds = min(rounds, repeat)
    inner = -(-repeat // rounds)
    marks: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, own in zip(runs, marks, strict=True):
            start = _mark(device)
            for _ in range(inner):
                run()
            own.append((start, _mark(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return [[start.elapsed_time(end) / inner for start, end in own] for own in marks]
    return [[1e3 * (end - start) / inner for start, end in own] for own in marks]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
