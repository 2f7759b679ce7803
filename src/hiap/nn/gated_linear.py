"""The Linear that carries gates, and the noise of all gates of a model.

Gates scale the weight of a Linear rather than its activations: `proj(x * z) == x @ (W * z).T`. A product
the size of the weight is nothing next to a pass over (batch, tokens, features), and no forward is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.nn.gates import Drawn, Gate, relaxed
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
        return {kind: gate for kind, gate in self.gates.items() if isinstance(gate, Gate)}

    def train(self, mode: bool = True) -> GatedLinear:
        self.ahead.clear()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedLinear:
        self.ahead.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, input: Tensor) -> Tensor:
        gates = self.by_kind()
        if not any(gate.training for gate in gates.values()):
            _, outputs, scale = self.layout.scales({kind: gate().unsqueeze(0) for kind, gate in gates.items()})
            bias: Tensor | None = self.bias
            if self.layout.scales_bias and outputs is not None:
                bias = (self.bias * outputs.flatten()).to(self.bias.dtype)
            return F.linear(input, (self.weight * scale.squeeze(0)).to(self.weight.dtype), bias)
        weight = None if torch.compiler.is_compiling() else self._scaled_ahead()
        return F.linear(input, *(scaled_weights([self])[0] if weight is None else (weight, self.ahead.bias)))

    def tensors(self) -> list[Tensor]:
        """What the weight under the gates is computed from: the weight, the bias where it is scaled, the logits."""
        logits = [gate.logit for gate in self.by_kind().values()]
        return [self.weight, *([self.bias] if self.layout.scales_bias else []), *logits]

    def state(self) -> Any:
        """What the weight under the gates depends on."""
        gates = [(gate.logit._version, gate.temperature) for gate in self.by_kind().values()]
        bias = None if self.bias is None else self.bias._version
        weight = id(self.weight), self.weight.data_ptr(), self.weight._version
        return weight, bias, _autocast_dtype(self.weight), gates

    def _scaled_ahead(self) -> Tensor | None:
        """The weight that was scaled ahead; None if this forward pass needs one of its own."""
        ahead, grad = self.ahead, torch.is_grad_enabled()
        ahead.used = True
        if ahead.weight is None or ahead.state != self.state():
            return None
        if torch._C._current_graph_task_id() == -1:  # not repeated inside a backward pass
            ahead.recorded = grad and not ahead.spent
        return ahead.weight if not grad or (ahead.recorded and ahead.weight.requires_grad) else None


def scaled_weights(layers: Sequence[GatedLinear], ahead: bool = False) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of layers of one layout under their gates in training.

    Args:
        ahead: keep them for the forward pass that comes, with the dtype that autocast would give them.
    """
    layout, gates = layers[0].layout, [layer.by_kind() for layer in layers]
    tensors = [tensor for column in zip(*(layer.tensors() for layer in layers), strict=True) for tensor in column]
    dtype = _autocast_dtype(layers[0].weight) if ahead else None
    kept = [layer.ahead for layer in layers] if ahead else []
    results = ScaledWeights.apply(layout, gates, dtype, kept, *tensors)
    biases = results[len(layers) :] or [layer.bias for layer in layers]
    return list(zip(results[: len(layers)], biases, strict=True))


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
        groups: dict[Any, list[GatedLinear]] = {}
        for layer in self.layers:
            if layer.ahead.used and all(gate.training and gate.drawn is not None for gate in layer.by_kind().values()):
                learns = any(tensor.requires_grad for tensor in layer.tensors())
                groups.setdefault((layer.layout, layer.weight.dtype, layer.weight.device, learns), []).append(layer)
        for group in groups.values():
            if len(group) > 1:
                for layer, (weight, bias) in zip(group, scaled_weights(group, ahead=True), strict=True):
                    layer.ahead.weight, layer.ahead.bias, layer.ahead.state = weight, bias, layer.state()
                    layer.ahead.used = False

    @torch.no_grad()
    def draw(self) -> None:
        for layer in self.layers:
            layer.ahead.clear()
        first = self.gates[0].logit
        generator = torch.Generator(first.device).manual_seed((self.seed * 1_000_003 + self.draws) % 2**63)
        self.draws += 1
        sizes = [gate.logit.numel() for gate in self.gates]
        noise = torch.rand(sum(sizes), generator=generator, dtype=first.dtype, device=first.device)
        tiny = torch.finfo(first.dtype).eps
        noise = noise.clamp_(tiny, 1 - tiny).logit_()
        scales, temperatures = {gate.noise_scale for gate in self.gates}, {gate.temperature for gate in self.gates}
        alike = len(scales) == len(temperatures) == 1 and all(gate.logit.device == first.device for gate in self.gates)
        if alike:  # the usual case: one operation for all gates
            noise.mul_(scales.pop())
            temperature = temperatures.pop()
            z = relaxed(torch.cat([gate.logit for gate in self.gates]) + noise, temperature)
            slopes = torch.split(z * (1 - z) / temperature, sizes)
            for gate, values, slope in zip(self.gates, torch.split(z, sizes), slopes, strict=True):
                gate.drawn = Drawn(values, slope, (gate.logit._version, temperature))
        for gate, part in zip(self.gates, torch.split(noise, sizes), strict=True):
            gate.noise = part if alike else part.to(gate.logit.device) * gate.noise_scale
            gate.drawn = gate.drawn if alike else None
