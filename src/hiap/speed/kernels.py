"""Triton kernels for the blocks of a pruned ViT, where norms, GELU and residuals cost as much as matrix products.

`linear` is a matrix product with what stands before and after it: a LayerNorm of its rows, a GELU, a residual. `attend`
is attention for heads whose q/k and value widths are narrow and differ. `ffn` is a whole FFN in one pass, for narrow
streams. Sums are in float32. Which tile sizes are best depends on shapes and device: `hiap.speed.fused` tries some.

Importing this module needs Triton. It sees no models.
"""

# mypy: ignore-errors
# ruff: noqa: N803 (tile sizes are constants of a kernel)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["GELUS", "attend", "ffn", "linear", "two_powers"]

LOG2_E = 1.4426950408889634

# gelu(x) = x sigmoid(x (a + b x^2 + c x^4)). The first is fitted to the exact GELU: it is off by 2.6e-5 at most, which
# half precision does not see. The others are what their names say.
GELUS = {
    "erf": [1.5950132, 0.0740136, -0.00070342],
    "tanh": [1.5957691216057308, 0.07135481627, 0.0],
    "quick": [1.702, 0.0, 0.0],
}


@triton.jit
def _gelu(x, a, b, c):
    """x sigmoid(x (a + b x^2 + c x^4))."""
    z = tl.minimum(x * x, 36.0)
    return x / (1.0 + tl.exp2(-1.4426950408889634 * x * (a + z * (b + z * c))))


@triton.jit
def _moments_kernel(X, MEAN, SCALE, rows, inner, eps, M: tl.constexpr, D: tl.constexpr):
    """The mean of each row, and one over its standard deviation."""
    r = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    k = tl.arange(0, D)
    known = (k < inner)[None, :]
    x = tl.load(X + r[:, None] * inner + k[None, :], mask=(r < rows)[:, None] & known, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / inner
    x = tl.where(known, x - mean[:, None], 0.0)
    tl.store(MEAN + r, mean, mask=r < rows)
    tl.store(SCALE + r, 1.0 / tl.sqrt(tl.sum(x * x, 1) / inner + eps), mask=r < rows)


@triton.jit
def _linear_kernel(
    X, W, MEAN, SCALE, SUMS, BIAS, R, Y, rows, inner, width, a, b, c5,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Y = R + gelu(norm(X) W + b), of which norm, GELU and residual are optional; W is (inner, width).

    norm(x) W = (x W - mean(x) sum(W)) / std(x), so that x itself is read.
    """
    columns = tl.cdiv(width, N)
    r = ((tl.program_id(0) // columns) * M + tl.arange(0, M)).to(tl.int64)
    c = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    row, column = (r < rows)[:, None], (c < width)[None, :]
    acc = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, inner, K, num_stages=STAGES):
        k = start + tl.arange(0, K)
        if EVEN:
            x = tl.load(X + r[:, None] * inner + k[None, :], mask=row, other=0.0)
            w = tl.load(W + k[:, None] * width + c[None, :], mask=column, other=0.0)
        else:
            x = tl.load(X + r[:, None] * inner + k[None, :], mask=row & (k < inner)[None, :], other=0.0)
            w = tl.load(W + k[:, None] * width + c[None, :], mask=(k < inner)[:, None] & column, other=0.0)
        acc = tl.dot(x, w, acc)
    if NORM:
        mean = tl.load(MEAN + r, mask=r < rows, other=0.0)
        scale = tl.load(SCALE + r, mask=r < rows, other=0.0)
        acc = (acc - mean[:, None] * tl.load(SUMS + c, mask=c < width, other=0.0)[None, :]) * scale[:, None]
    acc += tl.load(BIAS + c, mask=c < width, other=0.0)[None, :]
    if GELU:
        acc = _gelu(acc, a, b, c5)
    at = r[:, None] * width + c[None, :]
    if RESIDUAL:
        acc += tl.load(R + at, mask=row & column, other=0.0).to(tl.float32)
    tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=row & column)


@triton.jit(do_not_specialize=["heads", "first"])
def _attention_kernel(
    QKV, Y, heads, tokens, first, width, scale,
    Q: tl.constexpr, V: tl.constexpr, QP: tl.constexpr, VP: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Y = attention(QKV) for the first tokens of an image. Keys are in two parts of KA and KB tokens."""
    image = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * M + tl.arange(0, M)
    inside = (r < first)[:, None]
    base = QKV + image * tokens * width
    qd, vd, ka = tl.arange(0, QP), tl.arange(0, VP), tl.arange(0, KA)
    seen = (ka < tokens)[:, None]
    for h in tl.range(0, heads):
        keys, values = base + (heads + h) * Q, base + heads * 2 * Q + h * V
        q = tl.load(base + r[:, None] * width + h * Q + qd[None, :], mask=inside & (qd < Q)[None, :], other=0.0)
        k = tl.load(keys + ka[:, None] * width + qd[None, :], mask=seen & (qd < Q)[None, :], other=0.0)
        s = tl.where((ka < tokens)[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        most = tl.max(s, 1)
        if KB > 0:
            kb = KA + tl.arange(0, KB)
            seen_b = (kb < tokens)[:, None]
            k_b = tl.load(keys + kb[:, None] * width + qd[None, :], mask=seen_b & (qd < Q)[None, :], other=0.0)
            s_b = tl.where((kb < tokens)[None, :], tl.dot(q, tl.trans(k_b)) * scale, -float("inf"))
            most = tl.maximum(most, tl.max(s_b, 1))
        p = tl.exp2(s - most[:, None])
        total = tl.sum(p, 1)
        v = tl.load(values + ka[:, None] * width + vd[None, :], mask=seen & (vd < V)[None, :], other=0.0)
        o = tl.dot(p.to(v.dtype), v)
        if KB > 0:
            p_b = tl.exp2(s_b - most[:, None])
            total += tl.sum(p_b, 1)
            v_b = tl.load(values + kb[:, None] * width + vd[None, :], mask=seen_b & (vd < V)[None, :], other=0.0)
            o = tl.dot(p_b.to(v_b.dtype), v_b, o)
        o = o / total[:, None]
        at = (image * first + r)[:, None] * (heads * V) + h * V + vd[None, :]
        tl.store(Y + at, o.to(Y.dtype.element_ty), mask=inside & (vd < V)[None, :])


@triton.jit
def _ffn_kernel(
    X, W1, B1, W2, B2, Y, rows, hidden, eps, a, b, c5,
    A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y = X + gelu(norm(X) W1' + b1) W2 + b2; W1 and W2 are (hidden, A + B), the stream is in two parts."""
    D: tl.constexpr = A + B
    r = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    inside = (r < rows)[:, None]
    ca = tl.arange(0, A)
    at_a = r[:, None] * D + ca[None, :]
    xa = tl.load(X + at_a, mask=inside, other=0.0)
    dtype = xa.dtype
    xa = xa.to(tl.float32)
    total = tl.sum(xa, 1)
    if B > 0:
        cb = A + tl.arange(0, B)
        at_b = r[:, None] * D + cb[None, :]
        xb = tl.load(X + at_b, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(xb, 1)
    xa -= (total / D)[:, None]
    square = tl.sum(xa * xa, 1)
    if B > 0:
        xb -= (total / D)[:, None]
        square += tl.sum(xb * xb, 1)
    scale = (1.0 / tl.sqrt(square / D + eps))[:, None]
    xa = (xa * scale).to(dtype)
    acc_a = tl.zeros((M, A), tl.float32)
    if B > 0:
        xb = (xb * scale).to(dtype)
        acc_b = tl.zeros((M, B), tl.float32)
    for start in tl.range(0, hidden, H, num_stages=STAGES):
        h = start + tl.arange(0, H)
        y = tl.dot(xa, tl.trans(tl.load(W1 + h[:, None] * D + ca[None, :])))
        if B > 0:
            y = tl.dot(xb, tl.trans(tl.load(W1 + h[:, None] * D + cb[None, :])), y)
        y = _gelu(y + tl.load(B1 + h)[None, :], a, b, c5).to(dtype)
        acc_a = tl.dot(y, tl.load(W2 + h[:, None] * D + ca[None, :]), acc_a)
        if B > 0:
            acc_b = tl.dot(y, tl.load(W2 + h[:, None] * D + cb[None, :]), acc_b)
    acc_a += tl.load(X + at_a, mask=inside, other=0.0).to(tl.float32) + tl.load(B2 + ca)[None, :]
    tl.store(Y + at_a, acc_a.to(dtype), mask=inside)
    if B > 0:
        acc_b += tl.load(X + at_b, mask=inside, other=0.0).to(tl.float32) + tl.load(B2 + cb)[None, :]
        tl.store(Y + at_b, acc_b.to(dtype), mask=inside)


@torch.library.custom_op("hiap::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, sums: Tensor | None, bias: Tensor, residual: Tensor | None, gelu: list[float],
    eps: float, tile: list[int],
) -> Tensor:  # fmt: skip
    """residual + gelu(norm(x) weight + bias): a norm where the sums of the weight's columns are given.

    Args:
        weight: (inner, width); `sums` and `bias` (width) are float32.
        gelu: its three coefficients, one of `GELUS`; none for no GELU.
        tile: rows, columns and inner size of a tile, stages of the pipeline, warps.
    """
    M, N, K, stages, warps = tile
    inner, width = weight.shape
    x, rows = x.contiguous(), x.numel() // inner
    residual = None if residual is None else residual.contiguous()
    y = x.new_empty(*x.shape[:-1], width)
    grid = (triton.cdiv(rows, M) * triton.cdiv(width, N),)
    mean = scale = None
    if sums is not None:
        mean, scale = (torch.empty(rows, device=x.device, dtype=torch.float32) for _ in range(2))
        many = max(1, 2048 // _power(inner))
        _moments_kernel[(triton.cdiv(rows, many),)](x, mean, scale, rows, inner, eps, many, _power(inner), num_warps=4)
    _linear_kernel[grid](
        x, weight, mean, scale, sums, bias, residual, y, rows, inner, width, *(gelu or (0.0, 0.0, 0.0)), M, N, K,
        stages, inner % K == 0, sums is not None, bool(gelu), residual is not None, num_warps=warps,
    )  # fmt: skip
    return y


@linear.register_fake
def _(x, weight, sums, bias, residual, gelu, eps, tile):
    return x.new_empty(*x.shape[:-1], weight.shape[1])


@torch.library.custom_op("hiap::attend", mutates_args=())
def attend(qkv: Tensor, heads: int, qk_dim: int, value_dim: int, first: int, scale: float, tile: list[int]) -> Tensor:
    """Attention of the first tokens to all.

    Args:
        qkv: (images, tokens, width): queries of all heads, keys of all heads, values of all heads; the rest is padding.
        tile: rows of a tile, warps.
    """
    M, warps = tile
    qkv, (images, tokens, width) = qkv.contiguous(), qkv.shape
    y = qkv.new_empty(images, first, heads * value_dim)
    KA, KB = two_powers(tokens)
    _attention_kernel[(triton.cdiv(first, M), images)](
        qkv, y, heads, tokens, first, width, scale * LOG2_E, qk_dim, value_dim, _power(qk_dim), _power(value_dim),
        KA, KB, M, num_warps=warps,
    )  # fmt: skip
    return y


@attend.register_fake
def _(qkv, heads, qk_dim, value_dim, first, scale, tile):
    return qkv.new_empty(qkv.shape[0], first, heads * value_dim)


@torch.library.custom_op("hiap::ffn", mutates_args=())
def ffn(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, gelu: list[float], eps: float,
    tile: list[int],
) -> Tensor:  # fmt: skip
    """x + gelu(norm(x) weight1' + bias1) weight2 + bias2 in one pass.

    Args:
        weight1, weight2: (hidden, stream); the number of neurons is a multiple of the tile's.
        tile: rows and neurons of a tile, stages of the pipeline, warps.
    """
    M, H, stages, warps = tile
    hidden, stream = weight1.shape
    if sum(two_powers(stream)) != stream or hidden % H:
        raise ValueError(f"one pass needs a stream of two powers of two and neurons in {H}s; found {stream}, {hidden}")
    x, rows = x.contiguous(), x.numel() // stream
    y = x.new_empty(x.shape)
    _ffn_kernel[(triton.cdiv(rows, M),)](
        x, weight1, bias1, weight2, bias2, y, rows, hidden, eps, *gelu, *two_powers(stream), M, H, stages,
        num_warps=warps,
    )  # fmt: skip
    return y


@ffn.register_fake
def _(x, weight1, bias1, weight2, bias2, gelu, eps, tile):
    return x.new_empty(x.shape)


def _power(n: int) -> int:
    return max(triton.next_power_of_2(n), 16)


def two_powers(n: int) -> tuple[int, int]:
    """The least sum of one or two powers of two, of 16 at least, that holds a number; tiles have such sizes."""
    whole = _power(n)
    half = whole // 2
    if half >= 16 and half + _power(n - half) < whole:
        return half, _power(n - half)
    return whole, 0
