"""The same function with less memory traffic, for inference: `optimize` works on dense and compact models alike.

In bf16 the matrix products of a pruned ViT shrink as expected; norms, copies and kernel launches then dominate. Four
exact changes:

- The patch embedding is one matrix product over rows of pixels. Rows of zeros stand for the prefix tokens, so that all
  tokens and positions come from one product and one addition: no convolution, no layout copies, no concatenation.
- Where the classifier reads prefix tokens alone, the last block computes only those: its queries, projection and FFN
  run on one token instead of all, and so does the final norm.
- Rotary positions are a table that is computed once.
- Heads whose q/k and value widths differ are padded to the greater of both, where the device is faster with it.

What a compiler does better (residual + norm, bias + GELU) is left to `torch.compile`.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.errors import ExtractionError, InputError
from hiap.models.family import Site, logits_of
from hiap.models.registry import family_of
from hiap.nn.compact import Attention, Block, Widths, shrink_block
from hiap.nn.rotary import Rope, Rotary
from hiap.nn.token_merging import MergingBlocks
from hiap.pruning.attach import is_gated
from hiap.pruning.extract import TOLERANCE, check_dtype, difference, probe_images, rebuild
from hiap.pruning.topology import Topology
from hiap.speed.clock import Alone, materialise, timings
from hiap.speed.fused import check_available, fuse

__all__ = ["Optimized", "bake", "compiled", "optimize"]


class LastBlock(nn.Module):
    """A block of which only the first tokens are read."""

    def __init__(self, block: Block, tokens: int) -> None:
        super().__init__()
        self.block, self.tokens = block, tokens

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        block, first = self.block, x[:, : self.tokens]
        if isinstance(block.attn, Attention):
            first = first + block.ls1(_attend(block.attn, block.norm1(x), self.tokens, mask))
        elif block.attn is not None:
            first = first + block.ls1(block.attn(first))
        if block.mlp is not None:
            first = first + block.ls2(block.mlp(block.norm2(first)))
        return first


def _attend(attn: Attention, x: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
    """Attention of the first tokens to all; `mask` is added to the scores."""
    B, N, _ = x.shape
    H, width, bias = attn.num_heads, attn.split[0], attn.qkv.bias
    q = F.linear(x[:, :tokens], attn.qkv.weight[:width], None if bias is None else bias[:width])
    kv = F.linear(x, attn.qkv.weight[width:], None if bias is None else bias[width:])
    k, v = kv.split(attn.split[1:], dim=-1)  # type: ignore[no-untyped-call]
    q = attn.q_norm(q.view(B, tokens, H, attn.qk_dim)).transpose(1, 2)
    k = attn.k_norm(k.view(B, N, H, attn.qk_dim)).transpose(1, 2)
    v = v.view(B, N, H, attn.value_dim).transpose(1, 2)
    if attn.rotary is not None:
        q, k = attn.rotary(q, k)
    if attn.position is not None:
        bias = attn.position()[:, :, :tokens].to(q.dtype)
        mask = bias if mask is None else bias + mask
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attn.head_dim**-0.5)
    x = attn.proj(x.transpose(1, 2).reshape(B, tokens, attn.split[2]))
    return x


class Optimized(nn.Module):
    """A ViT for inference at one image size: logits in eval mode are those of the model it was made from.

    Args:
        model: it is taken apart: what stays in it is its head, and a stem that could not be folded. A model of a family
            without `embed` and `head` stays whole.
        last: how many tokens the last block has to compute; None for all.
    """

    def __init__(self, model: nn.Module, last: int | None = None) -> None:
        super().__init__()
        self.family = family_of(model)
        self.whole = not self.family.comes_apart
        if not self.whole:
            bake(self.family.sites(model), self.family.ropes(model))
        blocks = [site.module for site in self.family.sites(model)] if self.whole else self.family.take_blocks(model)
        if last is not None and blocks and not self.whole:
            inner = blocks[-1].blocks if isinstance(blocks[-1], MergingBlocks) else blocks
            inner[-1] = LastBlock(cast(Block, inner[-1]), last)
        self.stem = None if self.whole else self.family.fold_stem(model)
        self.blocks = nn.ModuleList(blocks)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return cast(Tensor, self.model(x))
        x = self.family.embed(self.model, x) if self.stem is None else self.stem(x)
        for step in self.blocks:
            x = step(x)
        return self.family.head(self.model, x)


def bake(sites: Sequence[Site], ropes: Sequence[Rope | None]) -> None:
    """Give converted or compact blocks the rotary tables of one image size, so that they run without their model."""
    for site, rope in zip(sites, ropes, strict=True):
        if site.pairs is not None and rope is not None:
            cast(Rotary, site.attention.rotary).bake(rope)


@torch.no_grad()
def optimize(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    batch: int = 64,
    pad: bool | None = None,
    last_block: bool = True,
    kernels: bool = False,
    say: Callable[[str], None] = lambda text: None,
    alone: Alone = nullcontext,
) -> Optimized:
    """A copy of a dense or compact model that is faster at inference and computes the same logits.

    Args:
        dtype: of the result; the model's own by default. Weights are folded before they are cast.
        batch: images at a time that the result is meant for.
        pad: whether heads whose q/k and value widths differ get the greater of both, with zeros, as some attention
            kernels want. By default either form is timed on the model's device, and the faster is kept.
        last_block: whether the last block computes only what the classifier reads.
        kernels: whether blocks run on fused Triton kernels where those are faster: in half precision, on a CUDA device.
            Each is checked against plain PyTorch. Finding the fastest takes up to a minute the first time.
        say: is told of progress.
        alone: held while kernels are timed, to keep others off the device.

    Raises:
        UnsupportedModelError: the model is of another family.
        InputError: the kernels are asked for where they do not run.
        ExtractionError: the logits differ (relative to the largest, in float64 where the device has it).
    """
    family = family_of(model)
    family.sites(model)
    if is_gated(model):
        raise InputError("the model has gates: extract it first")
    dtype, device = dtype or next(model.parameters()).dtype, next(model.parameters()).device
    if kernels:
        check_available(model, device, dtype)
    source = copy.deepcopy(model).eval()
    if next(source.parameters()).dtype.itemsize < 4:
        source = source.float()
    check = check_dtype(source)
    x = probe_images(source, 2).to(device, check)
    expected = logits_of(copy.deepcopy(source).to(check)(x))
    sites, cases = family.sites(source), (batch, family.tokens(source), dtype)
    wanted = {site.widths: site.widths if kernels and pad is None else _square(site) for site in sites}
    chosen = {
        w: wide if w != wide and (_gains(sites, w, wide, *cases) if pad is None else pad) else w
        for w, wide in wanted.items()
    }
    source = rebuild(source, Topology.from_counts(source), [chosen[site.widths] for site in sites])
    fast = Optimized(source, family.tokens_read(source) if last_block else None).eval()
    measured = difference([expected], [copy.deepcopy(fast).to(check)(x)])
    if not measured <= TOLERANCE[check]:
        raise ExtractionError(f"the optimised network does not reproduce its model: they differ by {measured:.3g}")
    if not kernels:
        return fast.to(dtype)
    return _on_kernels(fast, dtype, batch, family.tokens(model), x, expected, say, alone)


def _on_kernels(
    fast: Optimized,
    dtype: torch.dtype,
    batch: int,
    tokens: int,
    images: Tensor,
    expected: Tensor,
    say: Callable[[str], None],
    alone: Alone,
) -> Optimized:
    """The network on fused kernels; as it is, with a warning, where they compute something else."""
    plain = copy.deepcopy(fast).to(dtype)
    blocks = [block.block if isinstance(block, LastBlock) else block for block in fast.blocks]
    last = fast.blocks[-1].tokens if len(fast.blocks) and isinstance(fast.blocks[-1], LastBlock) else None
    fast.blocks = nn.ModuleList()
    fast.to(dtype).blocks = nn.ModuleList(fuse(cast(list[Block], blocks), dtype, batch, tokens, last, say, alone))
    own, theirs = (difference([expected], [net(images.to(dtype)).to(expected)]) for net in (fast, plain))
    if own <= 2 * theirs + torch.finfo(dtype).eps:
        return fast
    warnings.warn(
        f"the fused kernels are off by {own:.2g} where plain PyTorch in {dtype} is off by {theirs:.2g}: not used",
        stacklevel=3,
    )
    return plain


def _square(site: Site) -> Widths:
    """Widths with q/k and value dims alike; q/k dims that are normalised stay."""
    w = site.widths
    if not w.heads or site.qk_norm:
        return w
    return replace(w, qk_dim=max(w.qk_dim, w.value_dim), value_dim=max(w.qk_dim, w.value_dim))


def _gains(sites: list[Site], now: Widths, wide: Widths, batch: int, tokens: int, dtype: torch.dtype) -> bool:
    """Whether attention of the wider heads is faster, by the clock, on the device of the model."""
    site = next(site for site in sites if site.widths == now)
    device = next(site.module.parameters()).device
    batch = batch if device.type == "cuda" else min(batch, 4)
    x = torch.randn(batch, tokens, site.dim, device=device, dtype=dtype)
    forms = [cast(nn.Module, shrink_block(copy.deepcopy(site.block), site.dim, widths).attn) for widths in (now, wide)]
    forms = [materialise(form, device).to(dtype).eval() for form in forms]
    first, second = timings([functools.partial(form, x) for form in forms], device, 3, 10)
    return min(second) < 0.98 * min(first)


def compiled(model: nn.Module) -> nn.Module:
    """`torch.compile` as pruned widths want it.

    By default the compiler pads the rows of intermediate results to 128 bytes. Where a width is no multiple of that,
    the product that writes them then loses its fused bias and pays with two more passes over its output.
    """
    return cast(nn.Module, torch.compile(model, dynamic=False, options={"comprehensive_padding": False}))
