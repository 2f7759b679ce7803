"""The one surgery: a network and a topology become a smaller plain network, checked against the gated one.

Every tensor of the result is a slice of a tensor of the source (`slices` names them) or the tensor itself; only the
bias of a branch without units gets another name. Padding is a slice with index -1: a zero row or column.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hiap.errors import CheckpointError, ExtractionError, InputError
from hiap.models.family import Recipe, Site, put
from hiap.models.registry import family_of, sites
from hiap.nn.compact import Widths, shrink_block
from hiap.nn.granularities import GRANULARITIES
from hiap.nn.rotary import padded_pairs
from hiap.pruning.attach import attach, detach, is_gated
from hiap.pruning.topology import BlockTopology, Topology, harden, set_topology

__all__ = [
    "TOLERANCE",
    "Provenance",
    "check_dtype",
    "difference",
    "extract",
    "note_provenance",
    "origin_of",
    "probe",
    "probe_images",
    "provenance_of",
    "rebuild",
    "shrink",
    "slices",
    "source_name",
    "take",
]

Model = TypeVar("Model", bound=nn.Module)

# Largest difference allowed, relative to the largest output. Other GEMM shapes round otherwise, and some norms compute
# in float32 whatever they are given.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5}


@dataclass(frozen=True, repr=False)
class Provenance:
    """Where a compact model comes from; kept as its attribute `hiap`.

    Attributes:
        topology: what was kept, in units of the model it was extracted from.
        dense: widths of the dense model it all began with, however often it was pruned since.
        logit_difference: measured at extraction, relative to the largest output.
        tolerance: the difference that would have refused it.
        recipe: of the dense model; what the branches that are gone were like is read here. Empty where it has none.
    """

    topology: Topology
    dense: tuple[Widths, ...]
    round_to: int
    logit_difference: float
    tolerance: float
    recipe: Recipe = field(default_factory=dict, hash=False)

    def __deepcopy__(self, memo: Any) -> Provenance:
        return self  # nothing in it changes

    def __repr__(self) -> str:
        return (
            f"Provenance({len(self.dense)} blocks, round_to={self.round_to}, "
            f"logit_difference={self.logit_difference:.3g}, tolerance={self.tolerance:g})"
        )


def extract(model: Model, topology: Topology | None = None, round_to: int = 8) -> Model:
    """Cut the units that are not kept out of a model; the model itself is not changed.

    Args:
        model: a gated model, or an ungated one (dense or compact) with a topology.
        topology: what to keep; by default the decisions of the gates.
        round_to: pad value dims, q/k dims and neurons to a multiple with zeros, up to the dense width. 1: no padding.

    Returns:
        A plain module of the model's own class, without gates, masks or hooks, on its device, in its dtype and mode.

    Raises:
        ExtractionError: the outputs of the result differ from those of the gated model.
        TopologyError: the topology does not fit the model.
    """
    if round_to < 1:
        raise InputError(f"round_to must be at least 1; found {round_to}")
    if topology is None:
        if not is_gated(model):
            raise InputError("the model has no gates: pass a topology, or attach gates with hiap.attach first")
        topology = harden(model)
        reference = model
    else:
        topology.check(model)
        reference = _gated(model, topology).to(check_dtype(model)).eval()
    source = detach(copy.deepcopy(model))
    origin, recipe = origin_of(source, topology)
    widths = topology.widths(round_to)
    compact = rebuild(source, topology, widths)
    for module in compact.modules():
        for hooks in [value for name, value in vars(module).items() if name.endswith("_hooks")]:
            hooks.clear()
    measured, tolerance = _verify(reference, compact)
    note_provenance(compact, Provenance(topology, origin, round_to, measured, tolerance, recipe))
    return compact


def provenance_of(model: nn.Module) -> Provenance | None:
    """Where a compact model comes from; None for any other model."""
    found = getattr(model, "hiap", None)
    return found if isinstance(found, Provenance) else None


def origin_of(source: nn.Module, topology: Topology) -> tuple[tuple[Widths, ...], Recipe]:
    """The widths and the recipe of the dense model that a network came from, or is."""
    before = provenance_of(source)
    return (topology.dense, _recipe(source)) if before is None else (before.dense, before.recipe)


def note_provenance(model: nn.Module, provenance: Provenance) -> None:
    """Keep with a compact model where it comes from."""
    model.hiap = provenance  # type: ignore[assignment]
    family = family_of(model)
    record = {
        "blocks": [asdict(site.widths) for site in family.sites(model)],
        "dense": [asdict(widths) for widths in provenance.dense],
        "topology": provenance.topology.to_json(),
        "skeleton": provenance.recipe,
    }
    record |= {name: getattr(provenance, name) for name in ("round_to", "logit_difference", "tolerance")}
    family.note_record(model, record)


def _recipe(model: nn.Module) -> Recipe:
    try:
        return family_of(model).describe(model)
    except CheckpointError:  # such a model can be pruned, and only not be saved
        return {}


def rebuild(source: Model, topology: Topology, widths: Sequence[Widths]) -> Model:
    """Replace the blocks of an ungated model by compact ones that hold what a topology keeps, in place.

    Args:
        widths: of the new blocks; where they exceed what is kept, zeros fill them.
    """
    found = family_of(source).open(source)
    tensors = source.state_dict()
    trainable = {name: p.requires_grad for name, p in source.named_parameters()}
    cuts = slices(found, topology, widths)
    compact = shrink(source, widths)
    state = {}
    for name in compact.state_dict():
        tensor = tensors[source_name(name, tensors)]
        state[name] = take(tensor, *cuts[name]) if name in cuts else tensor
    compact.load_state_dict(state, strict=True, assign=True)
    for name, p in compact.named_parameters():
        p.requires_grad_(trainable[source_name(name, tensors)])
    return compact


def source_name(name: str, source: Container[str]) -> str:
    """The name a tensor of the compact model has in its source: a constant was the bias of the last layer."""
    if name in source:
        return name
    return name.replace("attn.bias", "attn.proj.bias").replace("mlp.bias", "mlp.fc2.bias")


def shrink(model: Model, widths: Sequence[Widths]) -> Model:
    """Replace the blocks of an ungated model by compact ones of these widths, in place; new Linears are on meta."""
    for site, own in zip(sites(model), widths, strict=True):
        put(model, site.name, shrink_block(site.block, site.dim, own))
    return model


def slices(found: Sequence[Site], topology: Topology, widths: Sequence[Widths]) -> dict[str, tuple[int, Tensor]]:
    """For each tensor that is cut: the dimension, and the source index of every row or column, -1 for padding.

    Args:
        found: the blocks of the model.
    """
    cuts = {}
    for site, block, new in zip(found, topology.blocks, widths, strict=True):
        if new.heads:
            for name, cut in _attention_cuts(block, site, new).items():
                cuts[f"{site.name}.attn.{name}"] = cut
        if new.neurons and block.neurons is not None:
            neurons = _padded(block.neurons, new.neurons)
            rows = torch.cat([neurons, _shift(neurons, site.widths.neurons or 0)]) if site.glu else neurons
            cuts |= {f"{site.name}.mlp.fc1.{name}": (0, rows) for name in ("weight", "bias")}
            cuts[f"{site.name}.mlp.fc2.weight"] = (1, neurons)
    return cuts


def _attention_cuts(block: BlockTopology, site: Site, new: Widths) -> dict[str, tuple[int, Tensor]]:
    old = site.widths
    assert block.heads is not None and old.heads is not None
    queries = _by_head(block.heads, block.qk_dims, old.qk_dim, new.qk_dim, site.pairs)
    values = _by_head(block.heads, block.value_dims, old.value_dim, new.value_dim)
    keys = old.heads * old.qk_dim  # offset of k in qkv; v starts at twice that
    rows = torch.cat([queries, _shift(queries, keys), _shift(values, 2 * keys)])
    cuts = {"qkv.weight": (0, rows), "qkv.bias": (0, rows), "proj.weight": (1, values)}
    cuts["position.table"] = (1, torch.tensor(block.heads))
    return cuts if site.pairs is None else cuts | {"rotary.dims": (0, queries)}


def _by_head(
    heads: Sequence[int], dims: Sequence[Sequence[int]], old: int, new: int, pairs: str | None = None
) -> Tensor:
    """Source index of each dim of each kept head, every head padded to `new` dims."""
    padded = [_padded(kept if pairs is None else padded_pairs(kept, old, new, pairs), new) for kept in dims]
    return torch.cat([_shift(one, head * old) for head, one in zip(heads, padded, strict=True)])


def _padded(indices: Sequence[int], length: int) -> Tensor:
    return torch.tensor([*indices, *[-1] * (length - len(indices))])


def _shift(index: Tensor, offset: int) -> Tensor:
    return torch.where(index < 0, index, index + offset)


def take(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows or columns of a tensor by index; -1 gives zeros."""
    index = index.to(tensor.device)
    shape = [-1 if d == dim else 1 for d in range(tensor.ndim)]
    return tensor.index_select(dim, index.clamp(min=0)).masked_fill(index.view(shape) < 0, 0)


def _gated(model: Model, topology: Topology) -> Model:
    """A copy of the model with gates set to the topology."""
    reference = detach(copy.deepcopy(model))
    found = family_of(reference).open(reference)
    if any(site.widths.heads or site.widths.neurons for site in found):
        tied = any(site.qk_norm for site in found)
        attach(reference, [kind for kind in GRANULARITIES if not (tied and kind == "qk_dim")])
        set_topology(reference, topology)
    for site, kept in zip(found, topology.blocks, strict=True):  # a constant has no gate: close it by hand
        block = site.block
        block.attn = None if kept.heads is None and site.widths.heads == 0 else block.attn
        block.mlp = None if kept.neurons is None and site.widths.neurons == 0 else block.mlp
    return reference


def _verify(reference: nn.Module, compact: nn.Module) -> tuple[float, float]:
    """Compare features and logits on random images. Returns the difference and the tolerance.

    The check runs in float64, where rounding is far from any mistake, or in float32 on devices that lack it.
    """
    dtype = check_dtype(compact)
    measured = difference(probe(reference, dtype), probe(compact, dtype))
    if not measured <= TOLERANCE[dtype]:
        raise ExtractionError(
            f"the extracted network does not reproduce the gated one: they differ by {measured:.3g} of the "
            f"largest output in {dtype}, allowed {TOLERANCE[dtype]:g}. Nothing was written. If the outputs of the "
            "model itself are finite, please report this with the model's name and the topology."
        )
    return measured, TOLERANCE[dtype]


def check_dtype(model: nn.Module) -> torch.dtype:
    """What results are compared in: float64, or float32 on a device that lacks it."""
    return torch.float32 if next(model.parameters()).device.type == "mps" else torch.float64


def difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Largest difference of tensors, relative to the largest value of the first; NaN if one is NaN."""
    relative = [
        (a - b).abs().max() / a.abs().max().clamp(min=torch.finfo(a.dtype).tiny)
        for a, b in zip(first, second, strict=True)
    ]
    return float(torch.stack(relative).max())


@torch.no_grad()
def probe(model: nn.Module, dtype: torch.dtype, images: int = 2) -> tuple[Tensor, ...]:
    """Features and logits of a model, as they are in eval and this dtype, on fixed random images."""
    if any(m.training for m in model.modules()) or any(p.dtype != dtype for p in model.parameters()):
        model = copy.deepcopy(model).to(dtype).eval()
    x = probe_images(model, images).to(next(model.parameters()))
    with torch.autocast(x.device.type, enabled=False):
        return family_of(model).outputs(model, x)


def probe_images(model: nn.Module, images: int) -> Tensor:
    """Random images, always the same, of the size a model takes: float64 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (images, *family_of(model).input_shape(model))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
