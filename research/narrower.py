"""The methods of Torch-Pruning, whose networks have a narrower stream than the dense one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from methods import Peer


def torch_pruning(run: Peer, isomorphic: bool, round_to: int | None = None) -> nn.Module:
    """The package's Taylor ranking with head pruning; the ratio is the least that meets the target.

    Whole heads go: where that leaves more than 1 % of the target, their ratio stays, and that of dims is the least.

    Args:
        round_to: multiple that widths are rounded to. Without it the network is closer to its target, because in
            multiples of 8 the width of the network alone moves its MACs by several per cent; with it, it is much faster
            in half precision.
    """
    import torch_pruning as tp

    dense = copy.deepcopy(run.dense).train()
    for x, y in run.batches():
        run.loss(dense, x, y).backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}

    def least(high: float, best: nn.Module | None, heads: float | None = None) -> tuple[float, nn.Module]:
        low = 0.0
        for _ in range(10):
            ratio = (low + high) / 2
            model = _torch_pruned(tp, run, gradients, (ratio, heads or ratio), isomorphic, round_to)
            if counted_macs(model, run) <= run.target:
                high, best = ratio, model
            else:
                low = ratio
        assert best is not None
        return high, best

    ratio, model = least(0.9, None)
    return model if counted_macs(model, run) >= 0.99 * run.target else least(ratio, model, heads=ratio)[1]


def _torch_pruned(
    tp: Any,
    run: Peer,
    gradients: dict[str, Tensor | None],
    ratios: tuple[float, float],
    isomorphic: bool,
    round_to: int | None,
) -> nn.Module:
    """With these shares of dims and of heads gone."""
    model: Any = copy.deepcopy(run.dense).train()
    for name, p in model.named_parameters():
        p.grad = gradients[name]
    for block in model.blocks:
        block.attn.attn_dim = -1  # follow the width of the input instead of remembering it
    pruner = tp.pruner.BasePruner(
        model,
        next(iter(run.data.val(1)))[0],
        importance=tp.importance.GroupTaylorImportance(),
        global_pruning=True,
        isomorphic=isomorphic,
        pruning_ratio=ratios[0],
        max_pruning_ratio=0.9,
        num_heads={block.attn.qkv: block.attn.num_heads for block in model.blocks},
        prune_num_heads=True,
        prune_head_dims=True,
        head_pruning_ratio=ratios[1],
        round_to=round_to,
        ignored_layers=[model.head],
    )
    pruner.step()
    model.embed_dim = model.num_features = model.pos_embed.shape[-1]  # the package leaves what the model says of itself
    for block in model.blocks:
        attn = block.attn
        attn.num_heads = pruner.num_heads[attn.qkv]
        width, attn.head_dim = attn.head_dim, attn.qkv.out_features // (3 * attn.num_heads)
        queries = attn.qkv.out_features // 3
        with torch.no_grad():  # fused attention scales by the new width; the scores were scaled by the old
            for tensor in (attn.qkv.weight, attn.qkv.bias):
                if tensor is not None:
                    tensor[:queries] *= (attn.head_dim / width) ** 0.5
    model.zero_grad()
    return model


def counted_macs(model: nn.Module, run: Peer) -> int:
    """torch's own count of one image, with attention in its plain form."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(model).eval()(next(iter(run.data.val(1)))[0])
    return counter.get_total_flops() // 2


def torch_pruning_taylor(run: Peer) -> nn.Module:
    return torch_pruning(run, isomorphic=False)


def torch_pruning_isomorphic(run: Peer) -> nn.Module:
    return torch_pruning(run, isomorphic=True)


def torch_pruning_aligned(run: Peer) -> nn.Module:
    """Taylor, with widths in the multiples that all other methods have: for comparisons of time."""
    return torch_pruning(run, isomorphic=False, round_to=run.config.round_to)
