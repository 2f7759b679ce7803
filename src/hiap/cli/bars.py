"""Bars for the terminal."""

from __future__ import annotations

import sys

__all__ = ["bar"]


def bar(share: float, width: int) -> str:
    """A bar that is filled to this share; of plain letters where the terminal has no blocks."""
    full, empty = "\N{FULL BLOCK}", "\N{LIGHT SHADE}"
    try:
        full.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        full, empty = "#", "."
    filled = min(max(round(share * width), 1 if share > 0 else 0), width)
    return full * filled + empty * (width - filled)
