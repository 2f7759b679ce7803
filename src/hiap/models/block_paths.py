"""A block of somebody else's, told by the paths of its members: found, checked, and converted to ours and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from hiap.errors import InputError, UnsupportedModelError
from hiap.models.family import put
from hiap.models.linears import joined, linear_of, parted, without_values
from hiap.nn.compact import Attention, Block, Mlp, Widths

__all__ = ["BlockPaths", "ChannelScale", "find", "kind_of"]

_LINEARS = ("q", "k", "v", "qkv", "out", "fc1", "fc2")
_SCALES = ("scale1", "scale2")


class ChannelScale(nn.Module):
    """Multiplies every channel by a number of its own."""

    def __init__(self, gamma: nn.Parameter) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


@dataclass(frozen=True)
class BlockPaths:
    """Where the members of a block are; see `hiap.DescribedFamily` for what each of them is."""

    norm1: str
    norm2: str
    fc1: str
    fc2: str
    act: str | nn.Module
    attention: str | None = None
    qkv: str | None = None
    q: str | None = None
    k: str | None = None
    v: str | None = None
    out: str | None = None
    heads: str | int | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    scale1: str | None = None
    scale2: str | None = None
    attn_drop: str | None = None
    proj_drop: str | None = None
    drop1: str | None = None
    drop2: str | None = None
    drop_path1: str | None = None
    drop_path2: str | None = None

    def __post_init__(self) -> None:
        given = {
            name for name in ("attention", "qkv", "q", "k", "v", "out", "heads") if getattr(self, name) is not None
        }
        ways = ({"attention"}, {"qkv", "out", "heads"}, {"q", "k", "v", "out", "heads"})
        if given not in ways:
            raise InputError(
                "describe the attention by attention= (an nn.MultiheadAttention), or by qkv=, out= and heads=, or by "
                f"q=, k=, v=, out= and heads=; found {', '.join(sorted(given)) or 'none of them'}"
            )
        if self.attention is not None and self.attn_drop is not None:
            raise InputError("an nn.MultiheadAttention has a dropout of its own: leave out attn_drop")
        act = self.act
        if not isinstance(act, str | nn.Module) or (
            isinstance(act, nn.Module) and next(act.parameters(), None) is not None
        ):
            raise InputError(f"act must be a path, or a module without parameters such as nn.GELU(); found {act!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            fits = (str, nn.Module) if field.name == "act" else (str, int) if field.name == "heads" else (str,)
            if value is not None and (not isinstance(value, fits) or value == ""):
                raise InputError(f"{field.name} must be a path such as 'attn.{field.name}'; found {value!r}")

    # -- what a block has -------------------------------------------------------------------------------------------

    def parts(self, where: str, block: nn.Module) -> dict[str, Any]:
        """The members of a block by their role.

        Raises:
            UnsupportedModelError: one is missing or is not what it must be, or the block has more than the description.
        """
        found = {
            field.name: find(block, value, field.name, where)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), str)
        }
        found |= {} if isinstance(self.act, str) else {"act": self.act}
        found |= {"heads": self.heads} if isinstance(self.heads, int) else {}
        for role, member in found.items():
            self._check_type(where, role, member)
        if self.attention is None:
            self._check_sizes(where, found)
        if found["fc2"].in_features != found["fc1"].out_features:
            _refuse(
                where,
                f"fc2 reads {found['fc2'].in_features} inputs and fc1 has {found['fc1'].out_features} outputs: only an "
                "MLP of two Linears with an activation between them can be described",
            )
        self._check_rest(where, block, found)
        return found

    def _check_type(self, where: str, role: str, member: Any) -> None:
        place = f"{role}={getattr(self, role)!r}: {where}.{getattr(self, role)} is {kind_of(member)}"
        if role in _LINEARS:
            if type(member) is not nn.Linear or member._parameters.get("weight") is None:
                raise UnsupportedModelError(f"{place}, not a plain nn.Linear")
        elif role == "heads":
            if type(member) is not int or member < 1:
                raise UnsupportedModelError(f"{place}, not a count of heads")
        elif role == "attention":
            self._check_multihead(place, member)
        elif role in _SCALES:
            if not isinstance(member, nn.Module | nn.Parameter):
                raise UnsupportedModelError(f"{place}, neither a module nor a parameter")
        elif role == "attn_drop":
            if not isinstance(member, nn.Dropout | float):
                raise UnsupportedModelError(f"{place}, neither an nn.Dropout nor its probability")
        elif not isinstance(member, nn.Module):
            raise UnsupportedModelError(f"{place}, not a module")

    def _check_multihead(self, place: str, member: Any) -> None:
        if type(member) is not nn.MultiheadAttention:
            raise UnsupportedModelError(f"{place}, not an nn.MultiheadAttention")
        for wrong, reason in (
            (not member.batch_first, "without batch_first=True"),
            (member.in_proj_weight is None, "with kdim or vdim of its own"),
            (member.bias_k is not None, "with add_bias_kv"),
            (member.add_zero_attn, "with add_zero_attn"),
        ):
            if wrong:
                raise UnsupportedModelError(f"{place} {reason}, which cannot be cut exactly")

    def _check_sizes(self, where: str, found: dict[str, Any]) -> None:
        heads = found["heads"]
        layers = [found["qkv"]] if "qkv" in found else [found["q"], found["k"], found["v"]]
        if "qkv" in found:
            if layers[0].out_features % 3:
                _refuse(where, f"qkv has {layers[0].out_features} outputs, not three parts of one size")
            widths = [layers[0].out_features // 3] * 3
        else:
            widths = [layer.out_features for layer in layers]
            if widths[0] != widths[1]:
                _refuse(where, f"q has {widths[0]} outputs and k has {widths[1]}: every head must have keys of its own")
            for what, kinds in (
                ("a bias", {layer.bias is not None for layer in layers}),
                ("trainable weights", {p.requires_grad for layer in layers for p in layer.parameters()}),
            ):
                if len(kinds) > 1:
                    _refuse(where, f"of q, k and v, some have {what} and others do not: they become one layer")
        for role, width in zip(("q", "k", "v"), widths, strict=True):
            if width % heads:
                _refuse(where, f"{heads} heads do not divide the {width} outputs of {role}")
        if found["out"].in_features != widths[2]:
            _refuse(where, f"out reads {found['out'].in_features} inputs and v has {widths[2]} outputs")

    def _check_rest(self, where: str, block: nn.Module, found: dict[str, Any]) -> None:
        """Refuse tensors that the description does not name: they would be lost."""
        named = {id(member) for member in found.values()}
        for member in found.values():
            if isinstance(member, nn.Module):
                named |= {id(one) for one in (*member.modules(), *member.parameters(), *member.buffers())}
        for kind, items in (("parameter", block.named_parameters()), ("buffer", block.named_buffers())):
            for name, tensor in items:
                if id(tensor) not in named:
                    _refuse(where, f"the description does not name its {kind} {name!r}, which would be lost")

    def unnamed(self, block: nn.Module) -> dict[str, nn.Module]:
        """The modules without children that the description does not name."""
        found = [member for member in self.parts("the block", block).values() if isinstance(member, nn.Module)]
        named = {id(module) for member in found for module in member.modules()}
        return {
            name: module
            for name, module in block.named_modules()
            if id(module) not in named and next(module.children(), None) is None
        }

    def widths(self, found: dict[str, Any]) -> tuple[int, Widths]:
        """The width of the tokens and the widths of a block, from its parts."""
        dim, neurons = found["fc1"].in_features, found["fc1"].out_features
        if self.attention is not None:
            heads = found["attention"].num_heads
            keys = values = found["attention"].head_dim
        else:
            heads, values = found["heads"], found["out"].in_features // found["heads"]
            keys = (found["q"].out_features if "q" in found else found["qkv"].out_features // 3) // heads
        return dim, Widths(heads, keys, values, neurons)

    # -- there and back ---------------------------------------------------------------------------------------------

    def to_block(self, block: nn.Module) -> Block:
        """The block with the members of ours. It keeps its shell, without weights, for the way back."""
        found = self.parts("the block", block)
        dim, widths = self.widths(found)
        assert widths.heads is not None and widths.neurons is not None
        attn_drop = found.get("attn_drop", 0.0)
        if self.attention is not None:
            multihead = found["attention"]
            qkv, out, attn_drop = *_of_multihead(multihead), multihead.dropout
        else:
            qkv = found["qkv"] if "qkv" in found else joined([found["q"], found["k"], found["v"]])
            out = found["out"]
        none = nn.Identity
        with torch.device("meta"):
            attn = Attention(
                *(dim, widths.heads, widths.qk_dim, widths.value_dim, widths.qk_dim),
                *(qkv.bias is not None, out.bias is not None),
                *(found.get("q_norm", none()), found.get("k_norm", none())),
                attn_drop if isinstance(attn_drop, nn.Dropout) else nn.Dropout(attn_drop),
                found.get("proj_drop", none()),
            )
            act = found["act"] if isinstance(self.act, str) else copy.deepcopy(found["act"])
            mlp = Mlp(dim, widths.neurons, True, True, act, found.get("drop1", none()), found.get("drop2", none()))
        attn.qkv, attn.proj, mlp.fc1, mlp.fc2 = qkv, out, found["fc1"], found["fc2"]
        scales = [found.get(name, none()) for name in _SCALES]
        scale1, scale2 = (ChannelScale(one) if isinstance(one, nn.Parameter) else one for one in scales)
        drop_path1, drop_path2 = (found.get(name, none()) for name in ("drop_path1", "drop_path2"))
        result = Block(found["norm1"], attn, scale1, drop_path1, found["norm2"], mlp, scale2, drop_path2)
        result.shell = (without_values(block),)  # type: ignore[assignment]  # a tuple: no child, not in the state
        return result.train(block.training)

    def from_block(self, block: Block) -> nn.Module:
        """The inverse of `to_block`; a block that was made otherwise stays as it is."""
        kept: Any = vars(block).get("shell")
        if kept is None:
            return block
        shell: nn.Module = kept[0]
        attn: Any = block.attn
        mlp: Any = block.mlp
        own = {"norm1": block.norm1, "norm2": block.norm2, "fc1": mlp.fc1, "fc2": mlp.fc2, "act": mlp.act}
        own |= {"q_norm": attn.q_norm, "k_norm": attn.k_norm, "proj_drop": attn.proj_drop, "drop1": mlp.drop1}
        own |= {"drop2": mlp.drop2, "drop_path1": block.drop_path1, "drop_path2": block.drop_path2}
        own |= {"scale1": block.ls1, "scale2": block.ls2, "attn_drop": attn.attn_drop, "out": attn.proj}
        own |= {"qkv": attn.qkv} if self.q is None else dict(zip("qkv", parted(attn.qkv, attn.split), strict=True))
        if self.attention is not None:
            multihead: Any = shell.get_submodule(self.attention)
            multihead.in_proj_weight, multihead.in_proj_bias = attn.qkv.weight, attn.qkv.bias
            multihead.out_proj.weight, multihead.out_proj.bias = attn.proj.weight, attn.proj.bias
        for role, member in own.items():
            path = getattr(self, role)
            if not isinstance(path, str) or isinstance(find(shell, path, role, "the block"), float):
                continue
            put(shell, path, cast(nn.Module, member.gamma) if isinstance(member, ChannelScale) else member)
        return shell.train(block.training)


def find(root: nn.Module, path: str, role: str, where: str) -> Any:
    """What a path leads to.

    Args:
        role, where: what the path was given as, and the name of the root; for errors.

    Raises:
        UnsupportedModelError: it leads nowhere.
    """
    found: Any = root
    for name in path.split("."):
        if not hasattr(found, name):
            has = f" (it has {', '.join(_members(found))})" if isinstance(found, nn.Module) and _members(found) else ""
            raise UnsupportedModelError(f"{role}={path!r}: {where} is {kind_of(found)} without a member {name!r}{has}")
        found, where = getattr(found, name), name if where == "the model" else f"{where}.{name}"
    return found


def _members(module: nn.Module) -> list[str]:
    """The names of the modules and parameters right inside a module."""
    return [*module._modules, *module._parameters][:12]


def _refuse(where: str, reason: str) -> None:
    raise UnsupportedModelError(f"{where}: {reason}")


def kind_of(value: Any) -> str:
    """The type of a value with its article, and the value where it is a plain one."""
    name = type(value).__name__
    text = f"{name} {value!r}" if isinstance(value, int | float | str) else name
    return f"an {text}" if text[0] in "AEIO" or text.startswith("int") else f"a {text}"


def _of_multihead(multihead: Any) -> Iterator[nn.Linear]:
    """The packed projection and the output projection of torch's attention, on its own parameters."""
    out = multihead.out_proj
    for weight, bias in ((multihead.in_proj_weight, multihead.in_proj_bias), (out.weight, out.bias)):
        yield linear_of(weight, bias, multihead.training)
