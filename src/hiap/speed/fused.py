"""Networks on the kernels of `hiap.speed.kernels`: for inference in half precision, on a GPU that has Triton.

A block becomes two steps, its attention and its FFN. Norms, biases, GELU, layer scales and residuals are part of the
matrix products; a branch that is a constant becomes part of a bias. Every product is tried in some tile sizes and as
plain PyTorch, by the clock, and the fastest is kept. What the kernels do not know stays a plain step.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hiap.nn.compact import Attention, Block, Constant, Mlp
from hiap.speed.clock import graphed, timings
from hiap.speed.steps import Attend, FeedForward, First, Linear, Plain, Shift, Tile

__all__ = ["available", "fuse"]

HALF = (torch.bfloat16, torch.float16)
MOST_TOKENS = 256  # that attention holds at once
NARROW = 256  # streams up to this width may run their FFN in one pass
THREADS = 8  # that compile
CLOSE = 0.02  # of the largest result, for one step on random numbers in half precision

LINEAR = ((128, 128, 64, 3, 8), (128, 128, 64, 3, 4), (128, 64, 64, 3, 4), (128, 256, 64, 3, 8), (64, 128, 32, 4, 4))
ATTEND = ((128, 4), (64, 2), (64, 4), (32, 1), (16, 1))
FFN = ((128, 64, 3, 8), (64, 32, 3, 4))


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on a device in a precision."""
    return device.type == "cuda" and dtype in HALF and importlib.util.find_spec("triton") is not None


def _gelu_of(block: Block) -> str | None:
    """What the kernels call the activation of an FFN; None if they do not know it, or the FFN."""
    if type(block.mlp) is not Mlp or not isinstance(block.norm2, nn.LayerNorm):
        return None
    act = block.mlp.act
    if isinstance(act, nn.GELU):
        return "erf" if act.approximate == "none" else "tanh"
    return {"GELU": "erf", "GELUTanh": "tanh", "QuickGELU": "quick"}.get(type(act).__name__)


def _attends(block: Block, tokens: int) -> bool:
    attn = block.attn
    return (
        type(attn) is Attention
        and isinstance(block.norm1, nn.LayerNorm)
        and isinstance(attn.q_norm, nn.Identity)
        and isinstance(attn.k_norm, nn.Identity)
        and attn.rotary is None
        and attn.position is None
        and tokens <= MOST_TOKENS
    )


@torch.no_grad()
def fuse(
    blocks: Sequence[Block],
    dtype: torch.dtype,
    batch: int,
    tokens: int,
    last: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> nn.Sequential:
    """The steps that compute what blocks compute, each in its fastest form for a batch of so many tokens.

    Args:
        last: how many tokens of the last block are read; None for all.
    """
    steps: list[nn.Module] = []
    for block in blocks:
        first = last if block is blocks[-1] else None
        if isinstance(block.attn, Constant):
            _shift(steps, block.attn.bias, block.ls1)
        elif block.attn is not None and _attends(block, tokens):
            steps.append(Attend(block, dtype, first))
        elif block.attn is not None:
            steps.append(Plain(block.norm1, block.attn, block.ls1, dtype))
        if first is not None and not (steps and isinstance(steps[-1], Attend) and steps[-1].first == first):
            steps.append(First(first))
        if isinstance(block.mlp, Constant):
            _shift(steps, block.mlp.bias, block.ls2)
        elif block.mlp is not None:
            gelu = _gelu_of(block)
            plain = gelu is None
            steps.append(
                Plain(block.norm2, block.mlp, block.ls2, dtype) if plain else FeedForward(block, dtype, cast(str, gelu))
            )
    found = nn.Sequential(*steps)
    if any(tensor.is_cuda for tensor in found.buffers()):
        tune(found, batch, tokens, say)
    return found


def _shift(steps: list[nn.Module], bias: Tensor, scale: nn.Module) -> None:
    """Add a constant to the stream: in the bias of the last step that has one."""
    gamma = getattr(scale, "gamma", None)
    bias = (bias if gamma is None else bias * gamma).detach().float()
    if steps and isinstance(steps[-1], Attend | FeedForward):
        steps[-1].out.bias += bias
    else:
        steps.append(Shift(bias))


@dataclass(frozen=True)
class Choice:
    """A module that can run in several forms: `run` does, in one of them."""

    module: Linear | Attend | FeedForward
    run: Callable[[Tile], Tensor]
    tiles: Sequence[Tile]  # beside plain PyTorch
    key: tuple[Any, ...]  # what the fastest form depends on


_FASTEST: dict[tuple[Any, ...], Tile] = {}  # of what was tried in this process


def tune(steps: Iterable[nn.Module], batch: int, tokens: int, say: Callable[[str], None] = lambda text: None) -> None:
    """Give every step its fastest form, by the clock. Compiling takes a while, once on a machine: Triton keeps it."""
    products, passes = [], []
    for step in steps:
        if isinstance(step, Attend):
            products += _attend_choices(step, batch, tokens)
            tokens = step.first or tokens
        elif isinstance(step, FeedForward):
            products += _product_choices(step, batch, tokens)
            passes += _pass_choices(step, batch, tokens)
        elif isinstance(step, First):
            tokens = step.tokens
    for choices in (products, passes):  # one pass is set against two products in their fastest form
        _settle(choices, say)


def _attend_choices(step: Attend, batch: int, tokens: int) -> list[Choice]:
    weight, first = step.qkv.weight, step.first or tokens
    x, qkv, o = (
        torch.randn(batch, count, width, device=weight.device, dtype=weight.dtype)
        for count, width in ((tokens, len(weight)), (tokens, weight.shape[1]), (first, len(step.out.weight)))
    )
    return [
        _choice(step.qkv, x),
        Choice(step, lambda tile: step.attend(qkv, tile), ATTEND, (*_where(qkv), *step.key)),
        _choice(step.out, o, x[:, :first].contiguous()),
    ]


def _product_choices(step: FeedForward, batch: int, tokens: int) -> list[Choice]:
    neurons, width = step.out.weight.shape
    x, h = (
        torch.randn(batch, tokens, n, device=step.out.weight.device, dtype=step.out.weight.dtype)
        for n in (width, neurons)
    )
    return [_choice(step.fc1, x), _choice(step.out, h, x)]


def _pass_choices(step: FeedForward, batch: int, tokens: int) -> list[Choice]:
    neurons, width = step.out.weight.shape
    if width > NARROW:
        return []
    x = torch.randn(batch, tokens, width, device=step.out.weight.device, dtype=step.out.weight.dtype)
    return [Choice(step, lambda tile: step.run(x, tile), FFN, (*_where(x), neurons, step.fc1.gelu))]


def _choice(module: Linear, x: Tensor, residual: Tensor | None = None) -> Choice:
    key = (*_where(x), *module.key, residual is not None)
    return Choice(module, lambda tile: module.run(x, residual, tile), LINEAR, key)


def _where(x: Tensor) -> tuple[Any, ...]:
    return (x.device, x.dtype, *x.shape)


def _settle(choices: Sequence[Choice], say: Callable[[str], None]) -> None:
    """Give every module its fastest form; each shape is timed once."""
    todo = {choice.key: choice for choice in choices if choice.key not in _FASTEST}
    for number, (key, choice) in enumerate(todo.items(), 1):
        say(f"kernels: shape {number} of {len(todo)}")
        _FASTEST[key] = _fastest(choice)
    for choice in choices:
        choice.module.tile = _FASTEST[choice.key]


def _fastest(choice: Choice) -> Tile:
    device, expected = choice.key[0], choice.run(None)
    with ThreadPoolExecutor(THREADS) as pool:  # compiles several at once
        works = list(pool.map(functools.partial(_works, choice, expected), choice.tiles))
    tiles = [None, *(tile for tile, right in zip(choice.tiles, works, strict=True) if right)]
    if len(tiles) == 1:
        return None
    calls = [graphed(functools.partial(choice.run, tile), device) for tile in tiles]
    times = timings(calls, device, 2, 20, 5)
    return tiles[min(range(len(tiles)), key=lambda i: min(times[i]))]


@torch.inference_mode()
def _works(choice: Choice, expected: Tensor, tile: Tile) -> bool:
    """Whether a form runs, and computes what plain PyTorch does: not every tile fits on every device."""
    try:
        with torch.cuda.device(choice.key[0]):
            return bool((choice.run(tile) - expected).abs().max() <= CLOSE * expected.abs().max())
    except Exception:  # Triton has many kinds, and plain PyTorch runs
        return False
