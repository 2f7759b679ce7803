"""The training objective, term by named term (paper, section 3.3).

`task + distill + features + lambda_macro * macro + lambda_micro * micro + feasibility`: costs are shares of the dense
prunable cost, feasibility is on probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn

from hiap.budget.cost import Cost
from hiap.errors import UnsupportedModelError
from hiap.models.family import logits_of
from hiap.models.registry import family_of, sites
from hiap.pruning.attach import gates_by_block
from hiap.pruning.count import expected_counts
from hiap.speed.inference import Optimized, optimize
from hiap.training.config import Config

__all__ = [
    "Goals",
    "Objective",
    "Teacher",
    "cost_terms",
    "distillation",
    "feasibility_terms",
    "feature_distance",
    "spread_of",
    "task_loss",
    "watch_blocks",
    "watched_blocks",
]


def task_loss(logits: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy with class indices (B) or mixed targets (B, classes)."""
    if target.ndim == 2:
        loss: Tensor = SoftTargetCrossEntropy()(logits, target)
        return loss
    return F.cross_entropy(logits, target, label_smoothing=smoothing)


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence from the teacher at a temperature, scaled by its square to keep the size of gradients."""
    student = F.log_softmax(logits.float() / temperature, dim=-1)
    target = F.log_softmax(teacher.float() / temperature, dim=-1)
    return F.kl_div(student, target, reduction="batchmean", log_target=True) * temperature**2


def watched_blocks(depth: int) -> tuple[int, ...]:
    """The blocks whose outputs are compared: the last of each quarter of the network."""
    return tuple(sorted({-(-depth * quarter // 4) - 1 for quarter in (1, 2, 3, 4)}))


@contextmanager
def watch_blocks(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect what these blocks of a ViT send on in a forward pass, in their order. Each (B, N, D)"""
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _block, _args, output: found.append(output)) for block in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def feature_distance(features: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Squared distance from the features of a teacher, as a share of how far those are spread; mean over blocks.

    Gates and extraction leave the residual stream as wide as it was, so that features compare as they are.

    Args:
        features, teacher: (B, N, D) a block.
    """
    shares = []
    for own, goal in zip(features, teacher, strict=True):
        own, goal = own.flatten(0, 1).float(), goal.flatten(0, 1).float()
        shares.append((own - goal).square().sum(1).mean() / spread_of(goal))
    return torch.stack(shares).mean()


def spread_of(features: Tensor) -> Tensor:
    """How far features are spread: the mean of their squared distances from their mean; never 0. (..., D)"""
    rows = features.flatten(0, -2).float()
    spread = (rows - rows.mean(0) if len(rows) > 1 else rows).square().sum(1).mean()
    return spread.clamp(min=1e-12 * rows.square().sum(1).mean())


def cost_terms(model: nn.Module, cost: Cost) -> dict[str, Tensor]:
    """Expected macro and micro cost, as shares of the dense prunable cost."""
    counts = expected_counts(model)
    return {"macro": cost.macro(counts) / cost.dense, "micro": cost.micro(counts) / cost.dense}


def feasibility_terms(model: nn.Module, k_min: float, gamma_attn: float, gamma_ffn: float) -> dict[str, Tensor]:
    """How far layers fall below their floors: open heads, value dims of an open head, neurons of an open FFN."""
    blocks = gates_by_block(model)
    zero = next(gate.logit for kinds in blocks for gate in kinds.values()).new_zeros(())
    head, dim, ffn = zero, zero, zero
    for kinds in blocks:
        p = {kind: gate.probability() for kind, gate in kinds.items()}
        if "head" in p:
            head = head + F.relu(k_min - p["head"].sum()).square()
        if "value_dim" in p:
            short = F.relu(gamma_attn - p["value_dim"].mean(dim=1, keepdim=True)).square()
            dim = dim + (p.get("head", torch.ones_like(short)) * short).sum()
        if "neuron" in p:
            short = F.relu(gamma_ffn - p["neuron"].mean()).square()
            ffn = ffn + p["ffn"].squeeze() * short if "ffn" in p else ffn + short
    return {"feasible_head": head, "feasible_dim": dim, "feasible_ffn": ffn}


class Goals(NamedTuple):
    """What a teacher says of a batch.

    Attributes:
        features: of the blocks that are compared; none where they are not.
    """

    logits: Tensor
    features: list[Tensor]


class Objective:
    """The loss of a batch: labels, and what a teacher says.

    Args:
        autocast: the context that forwards run in.
        unwrap: the network inside what processes and precision have put around it.
    """

    def __init__(
        self,
        config: Config,
        teacher: Teacher | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        unwrap: Callable[[nn.Module], nn.Module],
    ) -> None:
        self.config, self.teacher, self.autocast, self.unwrap = config, teacher, autocast, unwrap

    def terms(self, model: nn.Module, x: Tensor, target: Tensor, goals: Goals | None = None) -> dict[str, Tensor]:
        """The loss of a batch, term by term.

        Args:
            goals: what the teacher says of the batch, where that is known.
        """
        config = self.config
        with self.autocast(), watch_blocks(self.watched(model)[0]) as features:
            logits = logits_of(model(x)).float()
        terms = {"task": task_loss(logits, target, config.smoothing)}
        goals = self.goals(model, x) if goals is None else goals
        if goals is not None:
            terms["distill"] = distillation(logits, goals.logits, config.distill_temperature)
            if goals.features:
                terms["features"] = feature_distance(features, goals.features)
        return terms

    def goals(self, model: nn.Module, x: Tensor) -> Goals | None:
        """What the teacher says of a batch, if there is one. The model tells which of its blocks are compared."""
        if self.teacher is None:
            return None
        with self.autocast(), watch_blocks(self.watched(model)[1]) as features:
            return Goals(self.teacher(x), features)

    def watched(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The blocks whose outputs are compared, of the network and of its teacher; none where they are not."""
        if self.teacher is None or not self.config.compares_features:
            return [], []
        network = self.unwrap(model)
        own, goals = family_of(network).ends(network), self.teacher.blocks
        chosen = watched_blocks(len(own))
        return [own[i] for i in chosen], [goals[i] for i in chosen]

    def weighted(self, terms: dict[str, Tensor], weights: Mapping[str, float] = MappingProxyType({})) -> Tensor:
        """The loss: the sum of its terms.

        Args:
            weights: of terms that are not about the batch; 1 where there is none.
        """
        weights = {**self.weights, **weights}
        return torch.stack([weights.get(name, 1.0) * value for name, value in terms.items()]).sum()

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the terms that are about the batch."""
        share = self.config.distill_weight if self.teacher is not None else 0.0
        return {"task": 1.0 - share, "distill": share, "features": self.config.features_weight}


class Teacher:
    """A frozen model that sees the student's batch in its own normalisation and size.

    Args:
        student, teacher: (mean, std), each a value a channel.
        size: height and width the teacher wants; None takes images as they are.
        dtype: compute a ViT in it, optimised for inference; by default, and for other models, autocast has its way.
        watched: its blocks are, so that the last one computes more than the classifier reads.
    """

    def __init__(
        self,
        model: nn.Module,
        student: tuple[Sequence[float], Sequence[float]],
        teacher: tuple[Sequence[float], Sequence[float]],
        size: tuple[int, int] | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        watched: bool = False,
    ) -> None:
        self.model = model.eval().requires_grad_(False).to(device)
        self.fast = _optimized(self.model, dtype, last_block=not watched) if dtype is not None else None
        if self.fast is not None:
            self.model.to("cpu")  # it has done its part
        mean_s, std_s, mean_t, std_t = (
            torch.tensor(list(values), device=device).view(1, -1, 1, 1) for values in (*student, *teacher)
        )
        self.scale, self.shift = std_s / std_t, (mean_s - mean_t) / std_t
        self.same = student == teacher
        self.size = size

    @property
    def network(self) -> nn.Module:
        """The model that a forward goes through; once it is optimised, what is left of it outside the blocks."""
        return self.model if self.fast is None else self.fast.model

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of a ViT, in their order, as a forward goes through them."""
        return [site.module for site in sites(self.model)] if self.fast is None else list(self.fast.blocks)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Logits of the teacher for a batch normalised for the student."""
        if not self.same:
            x = x * self.scale + self.shift
        if self.size is not None and tuple(x.shape[-2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bicubic", align_corners=False)
        if self.fast is None:
            logits: Tensor = logits_of(self.model(x))
            return logits
        with torch.autocast(x.device.type, enabled=False):
            logits = self.fast(x.to(next(self.fast.parameters()).dtype))
            return logits


def _optimized(model: nn.Module, dtype: torch.dtype, last_block: bool) -> Optimized | None:
    """The same logits with less memory traffic, for models that allow it."""
    try:
        return optimize(model, dtype, pad=False, last_block=last_block)
    except UnsupportedModelError:
        return None
