"""A family of models: all that the rest of the package needs to know of one kind of ViT.

To add a family, write one file with a subclass of `Family`, and give an instance of it to `hiap.register_family`.
Gating, aligning, counting, cutting, saving, optimising and training then work on its models. They know one kind of
block, with the members of `hiap.nn.compact.Block`. A family with other blocks converts them (`to_block`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

from torch import Tensor, nn

from hiap.errors import UnsupportedModelError
from hiap.nn.compact import Attention, Block, Constant, Mlp, Widths
from hiap.nn.rotary import Rope

__all__ = [
    "Family",
    "ImageSize",
    "Preprocessing",
    "Recipe",
    "Site",
    "compact_pairs",
    "compact_widths",
    "logits_of",
    "put",
    "refuse",
]

ImageSize: TypeAlias = "int | tuple[int, int] | None"  # height and width; None: the model's own
Recipe: TypeAlias = dict[str, Any]  # what a model is rebuilt from, as JSON values


@dataclass(frozen=True)
class Preprocessing:
    """How images are made ready for a model."""

    size: tuple[int, int]  # height and width
    mean: tuple[float, ...]  # a value a channel
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "center"


@dataclass(frozen=True)
class Site:
    """One block of a model: where it is, what can be gated in it, and its present widths.

    Attributes:
        name: of the block in the model, such as "blocks.3".
        module: the block as it stands in the model.
        dim: the width of the residual stream.
        qk_norm: queries and keys are normalised, which ties all q/k dims of a head together.
        pairs: how rotary positions pair the q/k dims of a head, "adjacent" or "halves"; None where they are free.
        glu: the neurons of the FFN are gated: three matrices instead of two.
    """

    family: Family
    name: str
    module: nn.Module
    dim: int
    widths: Widths
    qk_norm: bool = False
    pairs: str | None = None
    glu: bool = False

    @property
    def block(self) -> Block:
        """The block with the members of `Block`. Changes to it reach the model once `Family.open` has converted it."""
        return self.module if isinstance(self.module, Block) else self.family.to_block(self.module)

    @property
    def attention(self) -> Attention:
        """The attention of a block that has heads."""
        return cast(Attention, self.block.attn)

    @property
    def ffn(self) -> Mlp:
        """The FFN of a block that has neurons."""
        return cast(Mlp, self.block.mlp)


class Family(ABC):
    """What is known of one kind of ViT. `model` is always a dense, gated or compact model of the family.

    A forward of the model must send images through a stem to tokens (B, N, D), tokens through the blocks, one after
    the other, and what comes out to a head. Blocks are pre-norm: `x + branch(norm(x))`.
    """

    name: str  # in config.json of saved models
    usage_key = "pretrained_cfg"  # what config.json calls how a model is used
    casts_buffers = True  # buffers that are in no file are loaded in the dtype of the weights

    # -- what must be written ---------------------------------------------------------------------------------------

    @abstractmethod
    def accepts(self, model: nn.Module) -> bool:
        """Whether a model is of this family: by its type, never by its name."""

    @abstractmethod
    def sites(self, model: nn.Module) -> list[Site]:
        """The blocks in their order.

        Raises:
            UnsupportedModelError: something in the model cannot be gated and cut exactly (`refuse` words it).
        """

    @abstractmethod
    def stem(self, model: nn.Module) -> nn.Module:
        """The module that every forward enters first, and only once."""

    @abstractmethod
    def input_shape(self, model: nn.Module, size: ImageSize = None) -> tuple[int, int, int]:
        """Channels, height and width of an image.

        Raises:
            InputError: the model cannot take images of this size.
        """

    @abstractmethod
    def tokens(self, model: nn.Module, size: ImageSize = None) -> int:
        """Sequence length N in the blocks, class token and the like included."""

    @abstractmethod
    def fixed_macs(self, model: nn.Module, size: ImageSize = None) -> int:
        """MACs of everything outside the blocks, for one image."""

    @abstractmethod
    def describe(self, model: nn.Module, origin: Recipe | None = None) -> Recipe:
        """The recipe of a model but for the widths of its blocks, as JSON values.

        Args:
            origin: the recipe of the dense model a compact one came from. It says what no branch is left to tell.

        Raises:
            CheckpointError: for a part that no recipe expresses.
        """

    @abstractmethod
    def build(self, recipe: Recipe) -> nn.Module:
        """The dense model of a recipe, on the meta device. A recipe comes from a file: trust nothing in it.

        Raises:
            CheckpointError: naming what no model has.
        """

    @abstractmethod
    def classes(self, model: nn.Module) -> int:
        """The number of logits; 0 for a model without a classifier."""

    @abstractmethod
    def set_classes(self, model: nn.Module, classes: int) -> None:
        """Give the model a new, random classifier."""

    @abstractmethod
    def classifier(self, model: nn.Module) -> list[nn.Module]:
        """The layers that a new classifier replaces."""

    @abstractmethod
    def preprocessing(self, model: nn.Module) -> Preprocessing:
        """How images are made ready for the model."""

    # -- what may be ------------------------------------------------------------------------------------------------

    def to_block(self, block: nn.Module) -> Block:
        """A block of the family with the members of `Block`, which computes the same. Here: it has them already."""
        return cast(Block, block)

    def from_block(self, block: Block) -> nn.Module:
        """The inverse of `to_block`, for a block of its dense widths."""
        return block

    def embed(self, model: nn.Module, images: Tensor) -> Tensor:
        """What enters the first block, (B, N, D). Write `embed` and `head` both or neither (`comes_apart`)."""
        raise NotImplementedError(f"{type(self).__name__} has no embed: its models run whole")

    def head(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Logits from what leaves the last block."""
        raise NotImplementedError(f"{type(self).__name__} has no head: its models run whole")

    def outputs(self, model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
        """What two models are compared by: logits, and features where they can be had."""
        return (logits_of(model(images)),)

    def ropes(self, model: nn.Module) -> Sequence[Rope | None]:
        """The table of rotary positions that each block is handed at the model's own image size, in eval."""
        return [None] * len(self.sites(model))

    def fold_stem(self, model: nn.Module) -> nn.Module | None:
        """For inference: take the stem out of the model, as one module from images to tokens. None: leave it in."""
        return None

    def fold_fixed_stem(self, model: nn.Module) -> nn.Module | None:
        """The same for images of the model's own size alone, also where the model takes other sizes."""
        return self.fold_stem(model)

    def tokens_read(self, model: nn.Module) -> int | None:
        """How many of the first tokens the head reads; None for all."""
        return None

    def prefix_tokens(self, model: nn.Module) -> int:
        """How many of the first tokens come from no patch (class token, registers). Here: those that the head reads."""
        return self.tokens_read(model) or 0

    def merging(self, model: nn.Module) -> tuple[int, int] | None:
        """Of a model that merges tokens: how many a block merges away, and how many of the first are left alone."""
        return None

    def ends(self, model: nn.Module) -> list[nn.Module]:
        """For hooks: a module for each block whose output is what the block sends on, (B, N, D). Here: the blocks."""
        return [site.module for site in self.sites(model)]

    def without_decay(self, model: nn.Module) -> set[str]:
        """Names of parameters that are spared weight decay, beside biases and norms."""
        return set()

    def unread(self, model: nn.Module) -> list[nn.Parameter]:
        """Parameters that the logits do not depend on: training leaves them as they are."""
        return []

    def build_dense(self, recipe: Recipe, widths: Sequence[Widths]) -> nn.Module:
        """The dense model of a recipe with blocks of these widths, where the family has such; on the meta device."""
        return self.build(recipe)

    def usage(self, model: nn.Module) -> dict[str, Any]:
        """How the model is used (size, mean, std, ...), as JSON values that are saved with it."""
        return dict(vars(model).get("usage", {}))

    def set_usage(self, model: nn.Module, usage: Mapping[str, Any]) -> None:
        """Note how the model is used; `usage` reads it, and so should `preprocessing`."""
        model.usage = dict(usage)  # type: ignore[assignment]

    def check_usage(self, where: str, usage: Mapping[str, Any]) -> None:
        """Raise a CheckpointError for a usage that could not be read; `where` names it. Here: any is taken."""
        return None

    def saved_fields(self, model: nn.Module) -> dict[str, Any]:
        """What else config.json says, for other programs to read."""
        return {}

    def saved_files(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Further JSON files of a saved model by name, for other programs to read; `config` is its config.json."""
        return {}

    def note_record(self, model: nn.Module, record: Mapping[str, Any]) -> None:
        """Keep with a compact model what it is rebuilt from, in the words of config.json. Here: nowhere."""
        return None

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that models of the family come from."""
        return {}

    # -- what follows -----------------------------------------------------------------------------------------------

    @property
    def comes_apart(self) -> bool:
        """Whether `embed` and `head` are written. If not, an optimised model runs by its own forward, stem included."""
        return type(self).embed is not Family.embed and type(self).head is not Family.head

    def open(self, model: nn.Module) -> list[Site]:
        """Convert the blocks of a model in place, so that changes to `Site.block` reach it."""
        converted = [(site, site.block) for site in self.sites(model) if not isinstance(site.module, Block)]
        for site, block in converted:
            if block is not site.module:
                block.converted = True
                _exchange(model, site, block)
        return self.sites(model)

    def close(self, model: nn.Module) -> None:
        """Convert the blocks that `open` has converted back; those that were cut since are other blocks."""
        for site in self.sites(model):
            if isinstance(site.module, Block) and site.module.converted:
                _exchange(model, site, self.from_block(site.module))

    def take_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Take the blocks out of a model, which leaves its stem and its head."""
        found = self.sites(model)
        homes = {site.name.rpartition(".")[0] for site in found}
        for site in found if "" in homes else ():
            put(model, site.name, nn.Identity())
        for home in homes - {""}:
            put(model, home, type(model.get_submodule(home))())
        return [site.module for site in found]


def _exchange(model: nn.Module, site: Site, block: nn.Module) -> None:
    """Put a block in the place of another, with the hooks that users have put on it."""
    vars(block).update({name: value for name, value in vars(site.module).items() if name.endswith("_hooks")})
    put(model, site.name, block)


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one that has this name in the model."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def compact_widths(block: Block) -> Widths:
    """The widths of a block of ours."""
    attn, mlp = block.attn, block.mlp
    neurons = mlp.neurons if isinstance(mlp, Mlp) else None if mlp is None else 0
    if isinstance(attn, Attention):
        return Widths(attn.num_heads, attn.qk_dim, attn.value_dim, neurons)
    assert attn is None or isinstance(attn, Constant)
    return Widths(None if attn is None else 0, 0, 0, neurons)


def compact_pairs(block: Block) -> str | None:
    """How rotary positions pair the q/k dims in a block of ours; None where they do not."""
    attn = block.attn
    return attn.rotary.layout if isinstance(attn, Attention) and attn.rotary is not None else None


def logits_of(output: Any) -> Tensor:
    """The logits in what a forward returns: a tensor, or an object with one; of a bare backbone, its features."""
    if isinstance(output, Tensor):
        return output
    if getattr(output, "feature_maps", None):
        return cast(Tensor, output.feature_maps[-1])
    names = ("logits", "image_embeds", "pooler_output", "last_hidden_state")
    return cast(Tensor, next(found for name in names if (found := getattr(output, name, None)) is not None))


def refuse(name: str, module: nn.Module, reason: str, needed: str) -> NoReturn:
    """Refuse a model for one of its modules: which, why, and what would be needed."""
    raise UnsupportedModelError(
        f"{name} is a {type(module).__name__}: {reason}. To support it HiAP would need {needed}."
    )
