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
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.models.registry import family_of
from hiap.nn.compact import Attention, Block, Constant, Mlp
from hiap.speed.clock import Alone, Call, device_name, graphed, timings
from hiap.speed.steps import Attend, FeedForward, First, Linear, Plain, Shift, Tile
from hiap.speed.tuned import keep_form, kept_forms

__all__ = ["check_available", "fuse", "hindrance"]

HALF = (torch.bfloat16, torch.float16)
MOST_TOKENS = 256  # that attention holds at once
NARROW = 256  # streams up to this width may run their FFN in one pass
THREADS = 8  # that compile
CLOSE = 0.02  # of the largest result, for one step on random numbers in half precision

LINEAR = ((128, 128, 64, 3, 8), (128, 128, 64, 3, 4), (128, 64, 64, 3, 4), (128, 256, 64, 3, 8), (64, 128, 32, 4, 4))
ATTEND = ((128, 4), (64, 2), (64, 4), (32, 1), (16, 1))
FFN = ((128, 64, 3, 8), (64, 32, 3, 4))


def check_available(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise an InputError with the reason where a model cannot run on the kernels."""
    reason = hindrance(model, device, dtype)
    if reason is not None:
        raise InputError(f"the fused kernels cannot run here: {reason}. Without `kernels`, plain PyTorch runs")


def hindrance(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model cannot run on the kernels; None if it can."""
    family = family_of(model)
    if family.merging(model) is not None:
        return "they do not merge tokens"
    if device.type != "cuda":
        return f"they need a CUDA device; found {device}"
    if dtype not in HALF:
        return f"they need half precision; found {dtype}: pass dtype=torch.bfloat16"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if not family.comes_apart:
        return f"models of the family {family.name!r} run whole; theirs would need `embed` and `head` (docs/family.md)"
    return None


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
    alone: Alone = nullcontext,
) -> nn.Sequential:
    """The steps that compute what blocks compute, each in its fastest form for a batch of so many tokens.

    Args:
        last: how many tokens of the last block are read; None for all.
        alone: held while kernels are timed, and not while they are compiled.
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
        tune(found, batch, tokens, say, alone)
    return found


def _shift(steps: list[nn.Module], bias: Tensor, scale: nn.Module) -> None:
    """Add a constant to the stream: in the bias of the last step that has one."""
    gamma = getattr(scale, "gamma", None)
    bias = (bias if gamma is None else bias * gamma).detach().float()
    before = steps[-1] if steps else None
    if isinstance(before, Attend | FeedForward):
        before.out.bias += bias
    elif isinstance(before, Shift):
        before.bias += bias
    else:
        steps.append(Shift(bias))


Shape: TypeAlias = "tuple[int, int, int]"


@dataclass(frozen=True)
class Choice:
    """A module that can run in several forms: `run` does, on inputs of these shapes, in one of them."""

    module: Linear | Attend | FeedForward
    shapes: tuple[Shape, ...]
    run: Callable[..., Tensor]
    tiles: Sequence[Tile]  # beside plain PyTorch
    kind: tuple[Any, ...]

    @property
    def like(self) -> Tensor:
        return next(self.module.buffers())

    @property
    def key(self) -> str:
        """What the fastest form depends on."""
        return repr((*_place(self.like.device), self.like.dtype, self.shapes, *self.kind))

    def on_random(self) -> Callable[[Tile], Tensor]:
        """The module on random inputs, in the form that it is called with."""
        like = self.like
        inputs = [torch.randn(shape, device=like.device, dtype=like.dtype) for shape in self.shapes]
        return functools.partial(self.run, *inputs)


_FASTEST: dict[str, Tile] = {}  # of this process


@functools.cache
def _place(device: torch.device) -> tuple[str, ...]:
    """Where a form is the fastest: the device, and versions of what makes the kernels."""
    return device_name(device), torch.__version__, version("hiap")


def tune(
    steps: Iterable[nn.Module],
    batch: int,
    tokens: int,
    say: Callable[[str], None] = lambda text: None,
    alone: Alone = nullcontext,
) -> None:
    """Give every step its fastest form, by the clock. This takes a while, once on a machine."""
    products, passes = [], []
    for step in steps:
        if isinstance(step, Attend):
            first = step.first or tokens
            x, qkv, o = ((batch, n, width) for n, width in _widths(step, tokens, first))
            products.append(_product(step.qkv, x))
            products.append(Choice(step, (qkv,), step.attend, ATTEND, step.key))
            products.append(_product(step.out, o, (batch, first, x[2])))
            tokens = first
        elif isinstance(step, FeedForward):
            neurons, width = step.out.weight.shape
            x = (batch, tokens, width)
            products += [_product(step.fc1, x), _product(step.out, (batch, tokens, neurons), x)]
            if width <= NARROW and _is_two_powers(width):
                passes.append(Choice(step, (x,), step.run, FFN, ("ffn", neurons, step.fc1.gelu)))
        elif isinstance(step, First):
            tokens = step.tokens
    for choices in (products, passes):  # one pass is set against two products in their fastest form
        _settle(choices, say, alone)


def _widths(step: Attend, tokens: int, first: int) -> list[tuple[int, int]]:
    """Tokens and widths of what goes into the products of an attention, and into the attention itself."""
    stream, qkv = step.qkv.weight.shape
    return [(tokens, stream), (tokens, qkv), (first, len(step.out.weight))]


def _product(module: Linear, x: Shape, residual: Shape | None = None) -> Choice:
    if residual is None:
        return Choice(module, (x,), lambda one, tile: module.run(one, None, tile), LINEAR, module.key)
    return Choice(module, (x, residual), module.run, LINEAR, module.key)


def _is_two_powers(width: int) -> bool:
    """Whether the kernel of a whole FFN, which has no mask for columns, fits a stream."""
    from hiap.speed import kernels

    return sum(kernels.two_powers(width)) == width


def _settle(choices: Sequence[Choice], say: Callable[[str], None], alone: Alone) -> None:
    """Give every module its fastest form; each shape is timed once on a machine, and checked once in a process."""
    todo = {choice.key: choice for choice in choices if choice.key not in _FASTEST}
    kept, right = kept_forms(), {}
    for number, (key, choice) in enumerate(todo.items(), 1):
        say(f"kernels: shape {number} of {len(todo)}")
        if key in kept and kept[key] in _right(choice, [kept[key]]):
            _FASTEST[key] = kept[key]
        else:
            right[key] = _right(choice, choice.tiles)
    if right:
        with alone():
            kept = kept_forms()  # others may have timed the same meanwhile
            for key, tiles in right.items():
                if key in kept and kept[key] in tiles:
                    _FASTEST[key] = kept[key]
                else:
                    _FASTEST[key] = _fastest(todo[key], tiles)
                    keep_form(key, _FASTEST[key])
    for choice in choices:
        choice.module.tile = _FASTEST[choice.key]


def _right(choice: Choice, tiles: Sequence[Tile]) -> list[Tile]:
    """Plain PyTorch, and the tiles that run and are right; all of them are compiled then."""
    run, others = choice.on_random(), [tile for tile in tiles if tile is not None]
    right = functools.partial(_is_right, run, run(None))
    with ThreadPoolExecutor(THREADS) as pool:  # compiles several at once
        works = list(pool.map(right, others))
    return [None, *(tile for tile, good in zip(others, works, strict=True) if good)]


def _fastest(choice: Choice, tiles: Sequence[Tile]) -> Tile:
    if len(tiles) == 1:
        return tiles[0]
    device, run = choice.like.device, choice.on_random()
    calls: list[Call] = [functools.partial(run, tile) for tile in tiles]
    if device.type == "cuda":
        calls = [graphed(call, device) for call in calls]
    times = timings(calls, device, 2, 20, 5)
    return tiles[min(range(len(tiles)), key=lambda i: min(times[i]))]


@torch.inference_mode()
def _is_right(run: Callable[[Tile], Tensor], expected: Tensor, tile: Tile) -> bool:
    """Whether a form runs, and computes what plain PyTorch does: not every tile fits on every device."""
    try:
        with torch.cuda.device(expected.device) if expected.is_cuda else nullcontext():
            return bool((run(tile) - expected).abs().max() <= CLOSE * expected.abs().max())
    except Exception:  # Triton has many kinds, and plain PyTorch runs
        return False
