"""An invertible change of basis that concentrates each head in few dims; outputs are unchanged.

Queries and keys meet only in their product, and so do values and the output projection: the dims of a head can be
multiplied by any invertible matrix on one side and by its inverse on the other. Of all these bases one is best to cut
in. In a balanced basis, both sides have uncorrelated dims of equal strength: each dim carries something of its own, and
the last ones carry next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.models.family import Site
from hiap.models.registry import family_of
from hiap.pruning.attach import check_finite, is_gated

__all__ = ["align_heads"]

Model = TypeVar("Model", bound=nn.Module)

RIDGE = 1e-6  # least moment along any axis, as a share of the largest


@torch.no_grad()
def align_heads(
    model: Model,
    images: Iterable[Tensor],
    *,
    queries: bool = True,
    values: bool = True,
    reduce: Callable[[Tensor], Tensor] = lambda moment: moment,
) -> Model:
    """Turn q/k dims and value dims of an ungated ViT in place, and return it. What it computes stays the same.

    Heads that normalise queries and keys (qk_norm), or turn them by rotary positions, keep their q/k dims.

    Args:
        images: batches as the model is trained on; a few hundred images tell enough.
        queries, values: which dims to turn.
        reduce: mean over processes, where each has images of its own.

    Raises:
        ValueError: the model has gates, weights or activations that are not finite, or there are no images. Nothing
            has been changed.
        UnsupportedModelError: the model is of another family.
    """
    if is_gated(model):
        raise InputError("heads are aligned before gates are attached: remove the gates with hiap.detach first")
    check_finite(model)
    family = family_of(model)
    try:
        found = [_Moments(site) for site in family.open(model) if site.widths.heads]
        _watch(model, found, images)
        for one in found:
            one.reduce(reduce)
        for one in found:
            one.turn(queries, values)
    finally:
        family.close(model)
    return model


def _watch(model: nn.Module, found: Sequence[_Moments], images: Iterable[Tensor]) -> None:
    """Let moments see what passes through the model."""
    hooks = [hook for one in found for hook in one.hooks()]
    training, seen = model.training, 0
    try:
        model.eval()
        for batch in images:
            model(batch)
            seen += len(batch)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not seen:
        raise InputError("no images were given, so the heads cannot be aligned")


class _Moments:
    """Second moments, summed, of the queries, keys and outputs of every head of a block. Each (heads, dims, dims)"""

    def __init__(self, site: Site) -> None:
        self.site, self.attn = site, site.attention
        self.heads, self.split = site.widths.heads or 0, (site.widths.qk_dim, site.widths.qk_dim, site.widths.value_dim)
        self.query = self.key = self.output = torch.zeros(())

    def hooks(self) -> list[Any]:
        return [
            self.attn.qkv.register_forward_hook(self._after_qkv),
            self.attn.proj.register_forward_pre_hook(self._before_proj),
        ]

    def _after_qkv(self, module: nn.Module, args: Any, output: Tensor) -> None:
        query, key, _ = torch.split(output.float(), [self.heads * width for width in self.split], dim=-1)
        self.query = self.query.to(output.device) + self._moment(query)
        # What all keys of an image share moves all scores of a query alike, which softmax does not see.
        self.key = self.key.to(output.device) + self._moment(key - key.mean(1, keepdim=True))

    def _before_proj(self, module: nn.Module, args: Any) -> None:
        self.output = self.output.to(args[0].device) + self._moment(args[0].float())

    def _moment(self, x: Tensor) -> Tensor:
        by_head = torch.unflatten(x, -1, (self.heads, -1))
        with torch.autocast(x.device.type, enabled=False):
            moment: Tensor = torch.einsum("bnhi,bnhj->hij", by_head, by_head)
        return moment

    def reduce(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Take the mean over processes.

        Raises:
            ValueError: squares of the activations overflowed float32.
        """
        self.query, self.key, self.output = (
            reduce(moment).cpu().double() for moment in (self.query, self.key, self.output)
        )
        if not all(bool(moment.isfinite().all()) for moment in (self.query, self.key, self.output)):
            raise InputError(
                f"the activations in {self.site.name}.attn are not finite, or too large to square in float32. "
                "Are the images finite, and are these the weights you meant?"
            )

    def turn(self, queries: bool, values: bool) -> None:
        attn, qkv = self.attn, self.attn.qkv
        rows = qkv.weight if qkv.bias is None else torch.cat([qkv.weight, qkv.bias.unsqueeze(1)], dim=1)
        parts = torch.split(rows.cpu().double(), [self.heads * width for width in self.split])
        query, key, value = (torch.unflatten(part, 0, (self.heads, -1)) for part in parts)
        output = torch.unflatten(attn.proj.weight.cpu().double().T, 0, (self.heads, -1))
        scale = cast(Tensor, getattr(self.site.block.ls1, "gamma", torch.ones(()))).cpu().double()
        if queries and not self.site.qk_norm and self.site.pairs is None:
            query, key = _turned(query, key, self.query, self.key)
        if values:
            weighed = output * scale
            value, output = _turned(value, output, self.output, weighed @ weighed.mT)
        rows = torch.cat([part.flatten(0, 1) for part in (query, key, value)])
        qkv.weight.copy_(rows[:, : qkv.in_features])
        if qkv.bias is not None:
            qkv.bias.copy_(rows[:, -1])
        attn.proj.weight.copy_(output.flatten(0, 1).T)


def _turned(left: Tensor, right: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of two layers in the balanced basis of each head; the product of the layers stays.

    The scale of a dim is free too: it is set so that the norms of its rows are to each other as those of the layers.

    Args:
        left, right: (heads, dims, ...), one row a dim.
        first, second: moments of what the dims of either side carry. (heads, dims, dims)
    """
    turn, back = _balanced(first, second)
    new_left, new_right = turn.mT @ left, back @ right
    ratio = left.norm(dim=(1, 2), keepdim=True) / right.norm(dim=(1, 2), keepdim=True)
    sizes = new_left.norm(dim=2, keepdim=True), new_right.norm(dim=2, keepdim=True)
    empty = (sizes[0] == 0) | (sizes[1] == 0)  # a dim of zeros, as padding leaves it
    scale = (ratio * sizes[1] / sizes[0]).sqrt().masked_fill(empty, 1.0)
    new_left, new_right = new_left * scale, new_right / scale
    sound = (new_left.isfinite().all(2) & new_right.isfinite().all(2)).all(1).view(-1, 1, 1)  # no head without weights
    return torch.where(sound, new_left, left), torch.where(sound, new_right, right)


def _balanced(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """T with T' first T = inv(T) second inv(T)' diagonal and falling, and its inverse."""
    root, inverse = _roots(first)
    u, s, _ = torch.linalg.svd(root @ _roots(second)[0])
    s = s.unsqueeze(-2)
    return inverse @ (u * s.sqrt()), (u / s.sqrt()).mT @ root


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a symmetric matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=torch.finfo(values.dtype).tiny).maximum(RIDGE * values[..., -1:]).unsqueeze(-2).sqrt()
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
