"""The network, block by block: what is kept, in front of the outline of what was there."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hiap.report.gathering import BlockView

__all__ = ["draw_network"]

CELL, GAP, HIGH = 20.0, 2.0, 20.0  # of a head: its pitch, the gap to the next, its height
FFN_WIDTH = 400.0


def draw_network(blocks: Sequence[BlockView]) -> str:
    """One row a block. A head is a cell, filled as wide as its value dims and as high as its q/k dims are kept.

    The drawings stretch with the page, the words beside them do not.
    """
    known = all(block.macs is not None for block in blocks)
    rows = [
        '<div class="row names"><span>block</span><span>attention heads</span><span>FFN neurons</span>'
        f"<span>{'MACs' if known else ''}</span></div>"
    ]
    for i, block in enumerate(blocks):
        share = f"{block.macs / block.dense_macs:.0%}" if block.macs is not None and block.dense_macs else ""
        rows.append(
            f'<div class="row"><span class="number">{i}</span>{_attention(i, block)}{_ffn(i, block)}'
            f'<span class="number">{share}</span></div>'
        )
    return f'<div class="network" role="img" aria-label="The network, block by block">{"".join(rows)}</div>'


def _attention(i: int, block: BlockView) -> str:
    dense, now, cells = block.dense, block.now, []
    for head in range(dense.heads or 0):
        left = head * CELL + GAP / 2
        kept = head in block.heads
        tip = f"block {i}, head {head}: closed"
        fill = ""
        if kept:
            wide = (CELL - GAP) * now.value_dim / max(dense.value_dim, 1)
            high = (HIGH - GAP) * now.qk_dim / max(dense.qk_dim, 1)
            fill = _rect("kept", left, HIGH - GAP / 2 - high, wide, high)
            tip = (
                f"block {i}, head {head}: {now.value_dim} of {dense.value_dim} value dims, "
                f"{now.qk_dim} of {dense.qk_dim} q/k dims"
            )
        cells.append(_group(tip, _rect("dense", left, GAP / 2, CELL - GAP, HIGH - GAP) + fill))
    return _svg("attention", max((dense.heads or 0) * CELL, CELL), "".join(cells))


def _ffn(i: int, block: BlockView) -> str:
    dense, now = block.dense.neurons, block.now.neurons
    if not dense:
        return _svg("ffn", FFN_WIDTH, "")
    wide = (FFN_WIDTH - GAP) * (now or 0) / dense
    tip = f"block {i}, FFN: gone" if now is None else f"block {i}, FFN: {now} of {dense} neurons ({now / dense:.0%})"
    outline = _rect("dense", GAP / 2, GAP / 2, FFN_WIDTH - GAP, HIGH - GAP)
    return _svg("ffn", FFN_WIDTH, _group(tip, outline + _rect("kept", GAP / 2, GAP / 2, wide, HIGH - GAP)))


def _svg(kind: str, width: float, inside: str) -> str:
    return f'<svg class="{kind}" viewBox="0 0 {width:g} {HIGH:g}" preserveAspectRatio="none">{inside}</svg>'


def _group(tip: str, inside: str) -> str:
    return f'<g data-tip="{escape(tip)}">{inside}</g>'


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"/>'
