"""Let the units that stay carry what the others carried, as far as they can.

What comes into `proj` or `fc2` is correlated: much of what one unit sends can be told from what the others send. So a
unit that closes is not lost as a whole. Its input is replaced by the best linear guess from the open ones, which is a
matter of weights alone: its column, times that guess, belongs to their columns and to the bias. And what hangs on a
gate is not all that its unit sends but what no other can tell, so that of units that say the same not all are dear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from hiap.attach import attach, detach, is_gated
from hiap.families import timm as family
from hiap.gates import GRANULARITIES, INNER, GatedLinear
from hiap.topology import Topology, set_topology

__all__ = ["Handover", "hand_over"]

Model = TypeVar("Model", bound=nn.Module)

RIDGE = 0.01  # of the least squares, as a share of the mean moment of the inputs
TINY = 1e-12
WINDOW = 10  # updates that the moments are averaged over


class Handover:
    """Tells every gated layer of a model what stands in for its closed inputs.

    Args:
        model: with gates on units inside branches; other layers are left alone.
        twins: models of the same structure, such as an average of the weights, that are treated alike.
        reduce: mean over processes, where each has images of its own.

    Attributes:
        moments: second moments of the inputs of each layer and of a constant, in CPU memory. (inputs + 1, inputs + 1)
        known: which inputs were open at the last update. (inputs)
    """

    def __init__(
        self,
        model: nn.Module,
        twins: Sequence[nn.Module] = (),
        reduce: Callable[[Tensor], Tensor] = lambda moment: moment,
    ) -> None:
        self.model, self.reduce = model, reduce
        self.layers = {
            name: [cast(GatedLinear, one.get_submodule(name)) for one in (model, *twins)]
            for name, module in model.named_modules()
            if isinstance(module, GatedLinear) and not module.by_kind().keys().isdisjoint(INNER)
        }
        self.moments: dict[str, Tensor] = {}
        self.known: dict[str, Tensor] = {}
        self.updates = 0

    @torch.no_grad()
    def update(self, images: Tensor) -> None:
        """Look at the network that the gates, hardened, make: one forward pass, each layer told just before it acts.

        Args:
            images: a batch as the model is trained on.
        """

        def before(name: str) -> Callable[..., None]:
            return lambda layer, args: self._look(name, layer, args[0].flatten(0, -2).float())

        self.updates += 1
        training = self.model.training
        hooks = [layer.register_forward_pre_hook(before(name)) for name, (layer, *_) in self.layers.items()]
        try:
            self.model.eval()(images)
        finally:
            self.model.train(training)
            for hook in hooks:
                hook.remove()

    def _look(self, name: str, layer: GatedLinear, inputs: Tensor) -> None:
        with torch.autocast(inputs.device.type, enabled=False):
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
            moment = self.reduce(inputs.T @ inputs / len(inputs))
            if name in self.moments:
                moment = self.moments[name].to(moment.device).lerp(moment, 1 / min(self.updates, WINDOW))
            is_open, _, _ = _hardened(layer)
            assert is_open is not None
            self.moments[name], self.known[name] = moment.cpu(), is_open > 0
            self._tell(name, moment)

    def _tell(self, name: str, moment: Tensor) -> None:
        told = guesses(moment, self.known[name], constant=self.layers[name][0].bias is not None)
        for layer in self.layers[name]:
            layer.told = told

    @torch.no_grad()
    def settle(self) -> None:
        """Move what stands in for closed inputs into the weights of the open ones, for good."""
        for layers in self.layers.values():
            for layer in layers:
                _, _, scale = _hardened(layer)
                if layer.told is not None and scale.any():
                    weight, bias = layer.scaled(layer.weight, layer.bias, None, scale)
                    layer.weight.copy_(torch.where(scale > 0, weight, layer.weight))
                    if bias is not None:
                        layer.bias.copy_(bias)
                layer.told = None

    def state(self) -> dict[str, Tensor]:
        """What `restore` needs, besides the weights and the number of updates."""
        both = {"moment": self.moments, "known": self.known}
        return {f"{kind}.{name}": tensor for kind, found in both.items() for name, tensor in found.items()}

    def restore(self, state: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        for name, (layer, *_) in self.layers.items() if updates else ():
            self.moments[name] = state[f"moment.{name}"].cpu()
            self.known[name] = state[f"known.{name}"].to(layer.weight.device)
            self._tell(name, self.moments[name].to(layer.weight.device))


def _hardened(layer: GatedLinear) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """What the gates of a layer, hardened, multiply: inputs, outputs and the weight."""
    return layer.scales({kind: gate.hard().float() for kind, gate in layer.by_kind().items()})


def guesses(moment: Tensor, known: Tensor, constant: bool = True) -> Tensor:
    """Every input from the known ones but itself and a constant, by least squares with a ridge. (inputs, inputs + 1)

    Args:
        moment: of the inputs and the constant. (inputs + 1, inputs + 1)
        known: which inputs the guesses may be made from. (inputs)
        constant: whether there is a bias to hold it.
    """
    ridge = torch.full_like(moment[0], max(RIDGE * float(moment.diagonal()[:-1].mean()), TINY))
    ridge[-1] = TINY
    usable = torch.cat([known, known.new_full((1,), constant)])
    inverse = torch.linalg.inv(moment[usable][:, usable] + ridge[usable].diag())
    told = torch.zeros_like(moment[:-1])
    closed, opened = (~known).nonzero(), known.nonzero()
    columns = usable.nonzero().T
    told[closed, columns] = moment[:-1][~known][:, usable] @ inverse
    among = -inverse / inverse.diagonal().unsqueeze(1)
    told[opened, columns] = among.fill_diagonal_(0.0)[: len(opened)]
    return told


def hand_over(model: Model, topology: Topology, images: Tensor) -> Model:
    """Prepare an ungated ViT, in place, for the extraction of a topology, and return it.

    Args:
        images: a batch as the model is trained on; a few hundred tell enough.

    Raises:
        ValueError: the model has gates, or there are no images.
        TopologyError: the topology is not one of this model.
    """
    if is_gated(model):
        raise ValueError("hand_over takes a model without gates: take them out with hiap.detach first")
    if not len(images):
        raise ValueError("no images came, so there is nothing to tell closed units by")
    tied = any(site.qk_norm for site in family.sites(model))
    attach(model, [kind for kind in GRANULARITIES if kind != "qk_dim" or not tied])
    try:
        set_topology(model, topology)
        handover = Handover(model)
        handover.update(images)
        handover.settle()
    finally:
        detach(model)
    return model
