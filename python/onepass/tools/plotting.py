"""Shared by the pictures of the commands. Imports matplotlib, of onepass[tools]."""

from __future__ import annotations

import bisect
import io
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

STOCK, OURS = "#5b6573", "#e4572e"
SMALL = "#6b7280"  # of the text below a picture
FOOTER_POINTS = 7.5
DPI = 130
POINTS_PER_INCH = 72
LINE_SPACING = 1.3  # lines of text are this many times as high as their font
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
        draw().savefig(file, format=format, dpi=DPI, facecolor="white")
        return file.getvalue()


def put_texts(figure: Figure, heading: str, points: float, footer: list[str]) -> None:
    """Puts the heading above the picture and the footer's lines below it, broken to its width.

    The figure grows by the height of their lines, so that the plots keep theirs.
    """
    width, height = figure.get_size_inches()
    room = width * 0.98  # they begin at 1 % of the width
    above = broken(heading, points, room)
    below = [part for line in footer for part in broken(line, FOOTER_POINTS, room)]
    lines = points * len(above) + FOOTER_POINTS * len(below)
    figure.set_size_inches(width, height + LINE_SPACING * lines / POINTS_PER_INCH)
    left = {"x": 0.01, "ha": "left", "parse_math": False}
    figure.suptitle("\n".join(above), fontsize=points, **left)
    figure.supxlabel("\n".join(below), fontsize=FOOTER_POINTS, color=SMALL, **left)


def broken(text: str, points: float, inches: float) -> list[str]:
    """The text in lines of at most this width in the default font.

    A number stays with its percent sign. A word that is wider than a line, such as a long path, is
    cut.
    """
    lines, line = [], ""
    for word in text.replace(" %", "\u00a0%").split(" "):
        longer = f"{line} {word}" if line else word
        if width_of(longer, points) <= inches:
            line = longer
            continue
        if line:
            lines.append(line)
        line = word
        while width_of(line, points) > inches:
            counts = range(1, len(line))  # at least one
            fit = bisect.bisect_right(counts, inches, key=lambda n: width_of(line[:n], points))
            count = max(fit, 1)
            lines.append(line[:count])
            line = line[count:]
    return [*lines, line]


def width_of(text: str, points: float) -> float:
    """Inches that the text takes in the default font at this size, in pixels of a png.

    Hinting makes it wider there than in formats without pixels.
    """
    font = FontProperties(size=points)
    width, _, _ = RendererAgg(1, 1, DPI).get_text_width_height_descent(text, font, ismath=False)
    return width / DPI


def shortened(name: str, length: int) -> str:
    """The end of the name, if it has more characters than `length`."""
    return name if len(name) <= length else f"...{name[3 - length :]}"
