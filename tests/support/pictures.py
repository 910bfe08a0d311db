"""Where the words of a drawn picture lie."""

import itertools
from collections.abc import Callable

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from onepass.tools import plotting


def drawn(draw: Callable[[], Figure]) -> Figure:
    """The figure in the style of the package's pictures, drawn in pixels."""
    with matplotlib.rc_context(plotting.STYLE):
        figure = draw()
        figure.set_dpi(plotting.DPI)
        FigureCanvasAgg(figure).draw()
    return figure


def words_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text of the picture with the rectangle that it takes, in pixels."""
    renderer = figure.canvas.get_renderer()
    beyond = {  # ticks that lie outside of the axis are not drawn
        id(label)
        for axes in figure.axes
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
        if not min(limits) <= tick <= max(limits)
    }
    return [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text() and id(text) not in beyond
    ]


def assert_words_lie_apart(figure: Figure) -> None:
    """No text leaves the picture, and none lies on another."""
    words = words_of(figure)
    for text, box in words:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for (one, box), (other, another) in itertools.combinations(words, 2):
        width = min(box.x1, another.x1) - max(box.x0, another.x0)
        height = min(box.y1, another.y1) - max(box.y0, another.y0)
        assert width <= 1 or height <= 1, f"{one!r} lies on {other!r}"
