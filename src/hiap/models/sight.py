"""The first look at a model that was only described: does it compute what the description says, and at what cost?

Nothing here is taken on trust. A copy of the model runs with its own blocks and with converted ones, and both must
agree. Tokens and MACs outside the blocks are measured in a run without blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hiap.errors import UnsupportedModelError
from hiap.models.block_paths import BlockPaths, kind_of
from hiap.models.family import put
from hiap.nn.compact import Block

__all__ = ["Outside", "empty_block", "outside", "verify"]

IMAGES = 2
NOISE = 0.02  # added to every weight of the copy: zeros and ones would hide a lost bias or norm
ROUNDING = 1e-5  # differences that float32 inside a model can make
ROUNDED = "A difference this small is probably rounding: if the blocks always compute in float32, pass tolerance=1e-5"
CAUSES = (
    "A block must compute x + scale1(out(attention(norm1(x)))), then x + scale2(fc2(act(fc1(norm2(x))))). Usual "
    "causes: a norm after the branch instead of before it, a missing residual, another activation, a softmax scale "
    "other than head_dim ** -0.5, positions or masks inside the attention, or a qkv layer that is not ordered q, k, v"
)


class Outside(NamedTuple):
    """What enters the first block, for one image, and what everything but the blocks costs."""

    tokens: int
    dim: int
    macs: int


def empty_block() -> Block:
    """A block without branches: tokens go through as they are."""
    none = nn.Identity
    return Block(none(), None, none(), none(), none(), None, none(), none())


@torch.no_grad()
def outside(model: nn.Module, blocks: Sequence[str], shape: tuple[int, int, int]) -> Outside:
    """Run a model without its blocks on one image, on its device; the model is not changed.

    Args:
        blocks: their names in the model.
        shape: of an image.
    """
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), False) for p in model.parameters()}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    shared |= {id(model.get_submodule(name)): empty_block() for name in blocks}
    hollow: nn.Module = copy.deepcopy(model, shared).eval()
    seen: list[Any] = []
    hollow.get_submodule(blocks[0]).register_forward_pre_hook(lambda module, args: seen.extend(args[:1]))
    like = next(model.parameters())
    x = torch.zeros((1, *shape), device=like.device, dtype=like.dtype)
    with _countable(), FlopCounterMode(display=False) as counter:
        hollow(x)
    (tokens,) = seen
    return Outside(int(tokens.shape[1]), int(tokens.shape[2]), int(counter.get_total_flops()) // 2)


@contextmanager
def _countable() -> Iterator[None]:
    """Keep torch from fused kernels whose work is not counted."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(before)


@torch.no_grad()
def verify(
    model: nn.Module,
    blocks: Mapping[str, int],
    stem: str,
    paths: BlockPaths,
    shape: tuple[int, int, int],
    tolerance: float,
) -> None:
    """Refuse a model that computes something else with converted blocks; the model is not changed.

    Args:
        blocks: the width of the tokens in each block, by the name of the block.
        stem: the name of the module that every forward enters first.
        paths: what is in a block.
        shape: of an image.
        tolerance: of differences, relative to the largest value, in float64.

    Raises:
        UnsupportedModelError: with what differs.
    """
    device = next(model.parameters()).device
    device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
    net, generator = copy.deepcopy(model).to(device, torch.float64).eval(), torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(device), alpha=NOISE)
    x = torch.randn((IMAGES, *shape), generator=generator, dtype=torch.float64).to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.autocast(device.type, enabled=False):
        watch = _Watch(net, [*blocks], stem)
        expected = _run(net, x, "the model cannot run in float64 on random images of the size described")
        watch.check(blocks)
        for name, (block, args, kwargs, result) in watch.calls.items():
            converted = paths.to_block(block)
            found = _run_block(name, converted, args, kwargs)
            _compare(name, result, found, tolerance)
            _compare_training(name, block, paths.unnamed(block), converted, args, kwargs)
            put(net, name, converted)
        found = _run(net.eval(), x, "the model cannot run with converted blocks")
        _compare("the model", expected, found, tolerance)


def _run(net: nn.Module, x: Tensor, problem: str) -> Tensor:
    try:
        result = net(x)
    except Exception as error:  # whatever a forward of somebody's own makes of it
        raise UnsupportedModelError(f"{problem}: {type(error).__name__}: {error}") from error
    if not isinstance(result, Tensor):
        raise UnsupportedModelError(f"the model returns a {type(result).__name__}; a tensor of logits is needed")
    return result


def _run_block(name: str, block: Block, args: Any, kwargs: Any) -> Tensor:
    try:
        result: Tensor = block(*args, **kwargs)
        return result
    except Exception as error:  # arguments that a block of ours does not take
        raise UnsupportedModelError(
            f"{name} is called with {len(args)} arguments{''.join(f', {key}=' for key in kwargs)}: only tokens can be "
            f"given to a converted block ({type(error).__name__}: {error})"
        ) from error


def _compare(name: str, expected: Any, found: Tensor, tolerance: float) -> None:
    if not isinstance(expected, Tensor):
        raise UnsupportedModelError(f"{name} returns a {type(expected).__name__}; tokens alone are needed")
    if not bool(expected.isfinite().all()):
        raise UnsupportedModelError(f"{name} has outputs that are not finite on random images: are its weights finite?")
    largest = float(expected.abs().max())
    off = float((expected - found).abs().max()) / max(largest, torch.finfo(expected.dtype).tiny)
    if expected.shape != found.shape or not off <= tolerance:
        raise UnsupportedModelError(
            f"{name} does not compute what its description says: outputs differ by {off:.1e} of the largest, allowed "
            f"is {tolerance:g}. {CAUSES if off > ROUNDING else ROUNDED}"
        )


def _compare_training(
    name: str, block: nn.Module, unnamed: Mapping[str, nn.Module], converted: Block, args: Any, kwargs: Any
) -> None:
    """Refuse a block with dropout that the description does not name, and the reverse."""
    state, random = _rng(args[0].device), dict.fromkeys(unnamed, False)
    before: dict[str, Tensor] = {}

    def enter(place: str) -> None:
        before[place] = state()

    def leave(place: str) -> None:
        random[place] = random[place] or not torch.equal(before[place], state())

    for place, module in unnamed.items():
        module.register_forward_pre_hook(lambda *_, place=place: enter(place))
        module.register_forward_hook(lambda *_, place=place: leave(place))
    draws = []
    for one in (block, converted):
        start = state()
        one.train()(*args, **kwargs)
        draws.append(not torch.equal(start, state()))
    found = next((place for place, drew in random.items() if drew), None)
    mend = "Name it as one of attn_drop, proj_drop, drop1, drop2, drop_path1 and drop_path2"
    if found is not None:
        raise UnsupportedModelError(
            f"{name}: the description does not name {found!r}, {kind_of(unnamed[found])}, which is random in training. "
            f"{mend}"
        )
    if draws[0] != draws[1]:
        less, more = ("the block", "the description") if draws[1] else ("the description", "the block")
        raise UnsupportedModelError(f"{name}: in training {more} has dropout, {less} has none. {mend}")


def _rng(device: torch.device) -> Callable[[], Tensor]:
    """The state of the generator of a device."""
    return (lambda: torch.cuda.get_rng_state(device)) if device.type == "cuda" else torch.get_rng_state


class _Watch:
    """Notes in which order the stem and the blocks of a model run, and what goes in and out of the blocks."""

    def __init__(self, net: nn.Module, blocks: Sequence[str], stem: str) -> None:
        self.order: list[str] = []
        self.calls: dict[str, tuple[nn.Module, Any, Any, Any]] = {}
        self.stem = stem
        self.hooks = [net.get_submodule(stem).register_forward_pre_hook(lambda *_: self.order.append(stem))]
        for name in blocks:
            block = net.get_submodule(name)
            self.hooks.append(block.register_forward_hook(self._noting(name), with_kwargs=True))

    def _noting(self, name: str) -> Callable[..., None]:
        def note(block: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self.order.append(name)
            self.calls[name] = (block, args, kwargs, result)

        return note

    def check(self, blocks: Mapping[str, int]) -> None:
        """Refuse a model that does not run its stem and then its blocks, each once and in their order."""
        for hook in self.hooks:
            hook.remove()
        if self.order != [self.stem, *blocks]:
            raise UnsupportedModelError(
                f"a forward must run {self.stem} and then every block once, in order; found {', '.join(self.order)}"
            )
        for name, (_, args, _, _) in self.calls.items():
            shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else None
            if shape is None or len(shape) != 3 or (shape[0], shape[2]) != (IMAGES, blocks[name]):
                raise UnsupportedModelError(
                    f"the first argument of {name} must be tokens of the shape (images, tokens, {blocks[name]}); found "
                    f"{shape} for {IMAGES} images"
                )
