"""Learning features instead of labels: what is compared, the loss, and what units are ranked by.

The compact network learns two things from the dense one. Tokens are the outputs of four blocks, the last of each
quarter of the network; every later layer reads them through a norm, so they are compared after one. The pooled output
is what the classifier reads or, in a model without one, what the model gives back: for CLIP and SigLIP the image
embedding in the space they share with texts. The classifier itself stays as it is.

Both distances are shares of the variance of the dense model's features: 0 means the same features, 1 means no better
than their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.data.interface import Data, val_part
from hiap.errors import InputError
from hiap.models.family import logits_of
from hiap.models.registry import family_of
from hiap.training.evaluate import Interrupted, alone
from hiap.training.objective import Goals, Objective, Teacher, feature_distance, spread_of, watch_blocks

__all__ = ["FeatureObjective", "Features", "feature_scores", "feature_width", "pooled_output"]


@dataclass(frozen=True)
class Features:
    """What is compared of one batch.

    Attributes:
        tokens: after a norm without weights; (B, N, D) for each of the blocks.
        pooled: (B, D), or (B, N, D) of a model that does not pool.
    """

    tokens: list[Tensor]
    pooled: Tensor

    def by_term(self) -> dict[str, list[Tensor]]:
        """The tensors of each term of the loss, all (B, N, D)."""
        pooled = self.pooled if self.pooled.ndim == 3 else self.pooled.unsqueeze(1)
        return {"tokens": self.tokens, "pooled": [pooled]}


@contextmanager
def pooled_output(network: nn.Module) -> Iterator[Callable[[Any], Tensor]]:
    """Within it, the function that is yielded makes the pooled output from what a forward has just returned."""
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _layer, args: found.append(args[0]))
        for layer in family_of(network).classifier(network)
    ]

    def pooled(output: Any) -> Tensor:
        read, found[:] = list(found), []
        return torch.cat(read, dim=-1) if read else logits_of(output)

    try:
        yield pooled
    finally:
        for hook in hooks:
            hook.remove()


class FeatureObjective(Objective):
    """The loss of a batch of images, without labels: how far tokens and pooled output are from the dense model's.

    At the dense model this loss and its gradient are 0, so the gradient does not tell which units matter. The worth of
    a unit is how much the loss grows without it: to second order, a sum over outputs of `weight / spread * |d output /
    d gate|^2` (the diagonal of the Gauss-Newton matrix). `terms_and_probe` gives a scalar whose squared gradient is an
    unbiased estimate of that sum.
    """

    def terms(self, model: nn.Module, x: Tensor, target: Tensor, goals: Goals | None = None) -> dict[str, Tensor]:
        return {name: distance for name, (distance, _) in self._compared(model, x).items()}

    def goals(self, model: nn.Module, x: Tensor) -> None:
        """Nothing is known beforehand: what the dense model says is compared as it is computed."""

    def terms_and_probe(self, model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The loss of a batch, term by term, and a scalar to rank units by: the square of its gradient counts.

        The scalar is the sum of all outputs with random signs, each weighted as in the loss.
        """
        compared, weights = self._compared(model, x), self.weights
        signed = []
        for name, (_, outputs) in compared.items():
            for own, spread in outputs:
                signs = torch.randint(0, 2, own.shape, device=own.device, dtype=own.dtype).mul_(2).sub_(1)
                rows = len(outputs) * own.shape[:-1].numel()
                signed.append((weights[name] / (rows * spread)).sqrt() * (own * signs).sum())
        return {name: distance for name, (distance, _) in compared.items()}, torch.stack(signed).sum()

    @property
    def weights(self) -> dict[str, float]:
        return {"tokens": self.config.tokens_weight, "pooled": self.config.pooled_weight}

    def _compared(self, model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, list[tuple[Tensor, Tensor]]]]:
        """For each term: the distance, and the outputs with the spread of the dense model's.

        A term without weight is kept: processes wait for gradients of all that a forward went through.
        """
        teacher = self.teacher
        assert teacher is not None
        network = self.unwrap(model)
        own_blocks, goal_blocks = self.watched(model)
        own = self._features(network, own_blocks, lambda: model(x))
        with torch.no_grad():
            goal = self._features(teacher.network, goal_blocks, lambda: teacher(x))
        goals, found = goal.by_term(), {}
        for name, outputs in own.by_term().items():
            pairs = list(zip(outputs, map(spread_of, goals[name]), strict=True))
            found[name] = feature_distance(outputs, goals[name]), pairs
        return found

    def _features(self, network: nn.Module, blocks: Sequence[nn.Module], forward: Callable[[], Any]) -> Features:
        with self.autocast(), watch_blocks(blocks) as tokens, pooled_output(network) as pooled:
            output = pooled(forward())
        return Features([F.layer_norm(one.float(), one.shape[-1:]) for one in tokens], output.float())


@torch.no_grad()
def feature_scores(
    model: nn.Module,
    teacher: Teacher,
    data: Data,
    batch: int = 256,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    stop: Callable[[], bool] = lambda: False,
    reduce: Callable[[Tensor], Tensor] = alone,
    rank: int = 0,
    world: int = 1,
) -> dict[str, float]:
    """How far the pooled output of a model is from the dense model's, on the validation images.

    Returns:
        error: squared distance, in percent of the variance of the dense model's pooled output.
        cosine: mean cosine similarity of the two.
        images: how many were seen.

    The arguments are those of `evaluate`.

    Raises:
        Interrupted: `stop` said so.
        InputError: there is no image; in all processes alike.
    """
    device = next(model.parameters()).device
    wide = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.zeros(0, dtype=wide, device=device)
    for x, _ in val_part(data, batch, rank, world):
        if stop():
            raise Interrupted
        x = x.to(device)
        with autocast(), pooled_output(model) as pooled:
            own = pooled(model(x))
        with autocast(), pooled_output(teacher.network) as pooled:
            goal = pooled(teacher(x))
        own, goal = (one.reshape(-1, one.shape[-1]).to(wide) for one in (own, goal))
        parts = [
            (own - goal).square().sum(),
            F.cosine_similarity(own, goal, dim=-1).sum(),
            goal.square().sum(),
            goal.new_tensor(len(goal)),
            goal.new_tensor(len(x)),
        ]
        added = torch.cat([torch.stack(parts), goal.sum(0)])
        sums = added if not len(sums) else sums + added
    sums = reduce(sums if len(sums) else torch.zeros(5 + feature_width(model), dtype=wide, device=device))
    error, cosine, squares, rows, images = sums[:5].tolist()
    if not images:
        raise InputError("there is no image to validate on")
    variance = squares - float(sums[5:].square().sum()) / rows if rows > 1 else squares
    return {"error": 100 * error / max(variance, 1e-12 * squares), "cosine": cosine / rows, "images": images}


@torch.no_grad()
def feature_width(model: nn.Module) -> int:
    """How many numbers the pooled output of a model has."""
    shape, like = family_of(model).input_shape(model), next(model.parameters())
    with pooled_output(model) as pooled:
        return int(pooled(model(like.new_zeros(1, *shape))).shape[-1])
