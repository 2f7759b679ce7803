"""Small ViTs of one's own, each with another attention, and what describes them to hiap."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hiap
from conftest import randomise

DIM, HEADS = 16, 2


class SplitAttention(nn.Module):
    """Three Linears; values have dims of their own, and dropout is a number."""

    def __init__(self, bias: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.heads, self.drop = HEADS, drop
        self.q, self.k, self.v = (nn.Linear(DIM, width, bias) for width in (12, 12, 20))
        self.out = nn.Linear(20, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        drop = self.drop if self.training else 0.0
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=drop).transpose(1, 2).flatten(2))


class PackedAttention(nn.Module):
    """One Linear, softmax by hand, norms of queries and keys."""

    def __init__(self, norm: bool = False, scale: float = 8**-0.5) -> None:
        super().__init__()
        self.qkv, self.out, self.scale = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM), scale
        self.drop = nn.Dropout(0.2)
        if norm:
            self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        scores = self.drop((q @ k.mT * self.scale).softmax(-1))
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1) >= self.rate) if self.training else x


class Layer(nn.Module):
    """Pre-norm, with any attention; what the tests of wrong descriptions need can be switched on."""

    def __init__(self, attn: nn.Module, scaled: bool = False, rate: float = 0.0, post: bool = False) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn, self.post = nn.LayerNorm(DIM), nn.LayerNorm(DIM), attn, post
        self.mlp = nn.Sequential(nn.Linear(DIM, 24), nn.SiLU(), nn.Linear(24, DIM))
        self.path = DropPath(rate) if rate else nn.Identity()
        self.gamma = nn.Parameter(torch.ones(DIM)) if scaled else None

    def attend(self, x: Tensor) -> Tensor:
        if isinstance(self.attn, nn.MultiheadAttention):
            return self.attn(x, x, x, need_weights=False)[0]
        return self.attn(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.ln1(x + self.attend(x))
            return self.ln2(x + self.mlp(x))
        y = self.attend(self.ln1(x))
        x = x + self.path(y if self.gamma is None else y * self.gamma)
        return x + self.mlp(self.ln2(x))


LAYERS = {
    "split": lambda i: Layer(SplitAttention(drop=0.1 * i)),
    "packed": lambda i: Layer(PackedAttention(), scaled=True, rate=0.1 * i),
    "qk_norm": lambda i: Layer(PackedAttention(norm=True)),
    "torch": lambda i: Layer(nn.MultiheadAttention(DIM, HEADS, dropout=0.1, batch_first=True)),
    "post_norm": lambda i: Layer(SplitAttention(), post=True),
    "odd_scale": lambda i: Layer(PackedAttention(scale=1.0)),
    "hidden_dropout": lambda i: Layer(SplitAttention(drop=0.1 * i)),
    "seq_first": lambda i: Layer(nn.MultiheadAttention(DIM, HEADS)),
}


class OwnViT(nn.Module):
    """A class token, fixed positions in no file, blocks run by index, and a pooled classifier."""

    def __init__(self, kind: str = "split", depth: int = 3, classes: int = 7, size: int = 8) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        self.patches = nn.Conv2d(1, DIM, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.register_buffer("positions", torch.linspace(-1, 1, 5 * DIM).view(1, 5, DIM), persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]  # a meta tensor could not say
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(LAYERS[kind](i) for i in range(depth))})
        self.norm, self.head = nn.LayerNorm(DIM), nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, classes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for i in range(len(self.rates)):
            x = self.encoder["layers"][i](x)
        return self.head(self.norm(x)[:, 0])


COMMON = {
    **{"blocks": "encoder.layers", "stem": "patches", "head": "head.2", "norm1": "ln1", "norm2": "ln2"},
    **{"fc1": "mlp.0", "act": "mlp.1", "fc2": "mlp.2", "size": "size", "channels": 1, "mean": (0.5,), "std": (0.5,)},
    "arguments": lambda model: {"kind": model.kind, "depth": len(model.rates), "size": model.size},
}
SPLIT = {"q": "attn.q", "k": "attn.k", "v": "attn.v", "out": "attn.out", "heads": "attn.heads"}
PACKED = {"qkv": "attn.qkv", "out": "attn.out", "heads": HEADS, "attn_drop": "attn.drop"}
DESCRIPTIONS = {
    "split": {**SPLIT, "attn_drop": "attn.drop"},
    "packed": {**PACKED, "scale1": "gamma", "drop_path1": "path", "act": nn.SiLU()},
    "qk_norm": {**PACKED, "q_norm": "attn.q_norm", "k_norm": "attn.k_norm"},
    "torch": {"attention": "attn"},
}
NONE = dict.fromkeys((*SPLIT, "attn_drop"), ...)
KINDS = list(DESCRIPTIONS)


def describe(kind: str, **changes: Any) -> hiap.DescribedFamily:
    given = {**COMMON, **DESCRIPTIONS.get(kind, SPLIT), **changes}
    return hiap.DescribedFamily("own", OwnViT, **{name: value for name, value in given.items() if value is not ...})


def make(kind: str = "split", **given: Any) -> OwnViT:
    torch.manual_seed(0)
    model = OwnViT(kind, **given)
    randomise(model)
    return model.double().eval()


def kinds_of(kind: str) -> tuple[str, ...]:
    return tuple(name for name in hiap.GRANULARITIES if not (kind == "qk_norm" and name == "qk_dim"))
