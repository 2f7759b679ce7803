"""The Linear that carries gates, and the noise of all gates of a model.

Gates scale the weight of a Linear rather than its activations: `proj(x * z) == x @ (W * z).T`. A product
the size of the weight is nothing next to a pass over (batch, tokens, features), and no forward is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.nn.gates import Gate
from hiap.nn.granularities import OLD_NAMES
from hiap.nn.scaling import Ahead, Layout, ScaledWeights

__all__ = ["GatedLinear", "NoiseSource", "scaled_weights"]


class GatedLinear(nn.Linear):
    """A Linear whose weight is scaled by gates; its own tensors keep their names.

    Args:
        linear: the layer to gate; its parameters are shared, not copied.
        units: shape of the gated units; their number is the number of gated inputs (or, for qk_dim, of the
            first outputs).
        gates: by granularity. `attention` and `ffn` scale the whole output, bias included; `qk_dim` scales the
            query rows, which come first; the others scale the inputs.
        pairs: the layout of q/k dims that rotary positions turn in pairs: a pair has one gate.
    """

    def __init__(
        self, linear: nn.Linear, units: Sequence[int], gates: dict[str, Gate], pairs: str | None = None
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        _take_over(self, linear)
        shape = (linear.out_features, linear.in_features)
        self.layout = Layout(tuple(gates), tuple(units), pairs, shape, linear.bias is not None)
        self.gates = nn.ModuleDict(gates).train(linear.training)
        self._by_kind = dict(gates)  # a ModuleDict is slow to look into
        self.ahead = Ahead()

    def plain(self) -> nn.Linear:
        """The ungated layer, on the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        _take_over(linear, self)
        return linear

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for old, new in OLD_NAMES.items():
            key = f"{prefix}gates.{old}.logit"
            if key in state_dict:
                state_dict[f"{prefix}gates.{new}.logit"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def by_kind(self) -> dict[str, Gate]:
        """The gates by granularity."""
        return self._by_kind

    def train(self, mode: bool = True) -> GatedLinear:
        self.ahead.clear()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedLinear:
        self.ahead.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and (weight := self._scaled_ahead()) is not None:
            return F.linear(input, weight, self.bias if self.ahead.bias is None else self.ahead.bias)
        gates = self.by_kind()
        bias: Tensor | None = self.bias
        if any(gate.training for gate in gates.values()):
            weight, *scaled = scaled_weights({self: self.tensors()})
            return F.linear(input, weight, scaled[0] if scaled else bias)
        _, outputs, scale = self.layout.scales({kind: gate().unsqueeze(0) for kind, gate in gates.items()})
        if self.layout.scales_bias and outputs is not None:
            bias = (self.bias * outputs.flatten()).to(self.bias.dtype)
        return F.linear(input, (self.weight * scale.squeeze(0)).to(self.weight.dtype), bias)

    def tensors(self) -> list[Tensor]:
        """What the weight under the gates is computed from: the weight, the bias where it is scaled, the logits."""
        logits = [gate.logit for gate in self._by_kind.values()]
        return [self.weight, self.bias, *logits] if self.layout.scales_bias else [self.weight, *logits]

    def state(self, tensors: Sequence[Tensor]) -> Any:
        """What the weight under the gates depends on."""
        versions = [(id(tensor), tensor._version) for tensor in tensors]
        gates = [(gate.temperature, gate.training) for gate in self._by_kind.values()]
        return tensors[0].data_ptr(), _autocast_dtype(tensors[0]), versions, gates

    def _scaled_ahead(self) -> Tensor | None:
        """The weight that was scaled ahead; None if this forward pass needs one of its own."""
        ahead, grad = self.ahead, torch.is_grad_enabled()
        ahead.used = True
        if ahead.weight is None or ahead.state != self.state(self.tensors()):
            return None
        if torch._C._current_graph_task_id() == -1:  # not repeated inside a backward pass
            ahead.recorded = grad and not ahead.spent
        return ahead.weight if not grad or (ahead.recorded and ahead.weight.requires_grad) else None


def scaled_weights(layers: dict[GatedLinear, list[Tensor]], ahead: bool = False) -> tuple[Tensor, ...]:
    """All weights, then all biases where gates scale them, of layers of one layout under their gates in training.

    Args:
        layers: with their tensors.
        ahead: they are for the forward pass that comes, with the dtype that autocast would give them.
    """
    first, *_ = layers
    dtype = _autocast_dtype(layers[first][0]) if ahead else None
    kept = [layer.ahead for layer in layers] if ahead else []
    tensors = chain.from_iterable(zip(*layers.values(), strict=True))
    gates = [layer.by_kind() for layer in layers]
    return cast("tuple[Tensor, ...]", ScaledWeights.apply(first.layout, gates, dtype, kept, *tensors))


def _autocast_dtype(weight: Tensor) -> torch.dtype | None:
    """What autocast makes of a weight; None if it leaves it."""
    kind = weight.device.type
    if weight.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _take_over(new: nn.Linear, old: nn.Linear) -> None:
    """Move parameters, mode and the user's hooks from one Linear to another."""
    new.weight, new.bias, new.training = old.weight, old.bias, old.training
    vars(new).update({name: value for name, value in vars(old).items() if "hook" in name})


class NoiseSource:
    """Draws the noise of all gates of a model, once a forward pass in training.

    It is a forward pre-hook of the module that every forward enters first. Inside a backward pass it does nothing, so
    gradient checkpointing sees one draw on recompute. A draw depends on `seed`, the number of draws before it and the
    kind of device, never on torch's global generator: all processes of a run that share the seed share the draw.

    Layers of one layout are scaled by their gates right after the draw, all at once.
    """

    def __init__(self, layers: Sequence[GatedLinear], seed: int = 0) -> None:
        self.layers = list(layers)
        self.gates = [gate for layer in layers for gate in layer.by_kind().values()]
        self.seed = seed
        self.draws = 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        if any(gate.training for gate in self.gates):
            self._draw_unless_recomputing()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _draw_unless_recomputing(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.draw()
            self.scale_ahead()

    def scale_ahead(self) -> None:
        """Scale the weights of the coming forward pass, unless nothing used the last ones (a compiled model's)."""
        groups: dict[Any, dict[GatedLinear, list[Tensor]]] = {}
        for layer in self.layers:
            gates = layer.by_kind().values()
            if layer.ahead.used and all(gate.training for gate in gates):
                weight, *others = tensors = layer.tensors()
                learns = weight.requires_grad or any(tensor.requires_grad for tensor in others)
                temperatures = tuple([gate.temperature for gate in gates])
                key = layer.layout, weight.dtype, weight.device, learns, temperatures
                groups.setdefault(key, {})[layer] = tensors
        for group in groups.values():
            if len(group) > 1:
                results = scaled_weights(group, ahead=True)
                weights, biases = results[: len(group)], results[len(group) :] or [None] * len(group)
                for (layer, tensors), weight, bias in zip(group.items(), weights, biases, strict=True):
                    ahead = layer.ahead
                    ahead.weight, ahead.bias, ahead.state, ahead.used = weight, bias, layer.state(tensors), False

    @torch.no_grad()
    def draw(self) -> None:
        for layer in self.layers:
            layer.ahead.clear()
        kept = [gate.noise for gate in self.gates]
        sizes, dtype, device = [noise.numel() for noise in kept], kept[0].dtype, kept[0].device
        generator = torch.Generator(device).manual_seed((self.seed * 1_000_003 + self.draws) % 2**63)
        self.draws += 1
        tiny = torch.finfo(dtype).eps
        noise = torch.rand(sum(sizes), generator=generator, dtype=dtype, device=device).clamp_(tiny, 1 - tiny).logit_()
        parts = torch.split(noise, sizes)
        torch._foreach_mul_(parts, [gate.noise_scale for gate in self.gates])
        torch._foreach_copy_(kept, parts)
