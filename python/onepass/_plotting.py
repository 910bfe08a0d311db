"""Shared by the pictures of the commands. Imports matplotlib, of onepass[tools]."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

STOCK, OURS = "#5b6573", "#e4572e"
SMALL = "#6b7280"  # of the text below a picture
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def format_of(path: str) -> str:
    """The format of a file name's suffix, png if it has none.

    Raises:
        ValueError: matplotlib knows no such format.
    """
    suffix = Path(path).suffix.removeprefix(".").lower() or "png"
    known = FigureCanvasBase.get_supported_filetypes()
    if suffix not in known:
        raise ValueError(f"--plot must end in one of {', '.join(sorted(known))}, got {path}")
    return suffix


def drawn(draw: Callable[[], Figure], format: str) -> bytes:
    """The figure that `draw` makes in this house's style, as a file of this format."""
    with matplotlib.rc_context(STYLE):
        file = io.BytesIO()
        draw().savefig(file, format=format, dpi=130, facecolor="white")
        return file.getvalue()


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))
