"""Draws docs/images/call.svg: what a call of rms_norm in training passes through, and where.

python docs/call_drawing.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "call.svg"

# (layer, file, what the forward does there, what the backward does there); names of functions end
# in "()" and stand in that file.
STAGES = (
    ("functional", "python/onepass/functional/norm.py", ("rms_norm(): torch's signature",), ()),
    (
        "_ops",
        "python/onepass/_ops/norm.py",
        ("norm(): eps and seed; _norm.run: the raw", "operator, or autograd's Function around it"),
        ("_Norm.backward: which gradients are wanted",),
    ),
    (
        "torch",
        "",
        ("the dispatcher: onepass::norm_forward,", "CPU or CUDA, or the fake (meta)"),
        ("onepass::norm_backward",),
    ),
    (
        "ops",
        "csrc/ops/norm.cpp",
        ("check_forward(); norm_forward() allocates", "outputs and fills NormForward"),
        ("check_backward(), norm_backward()",),
    ),
    (
        "plan, run",
        "csrc/ops/runtime.h",
        ("run_operator(): plan, record for explain,", "workspace, run"),
        ("the same",),
    ),
    (
        "cpu",
        "csrc/cpu/norm/forward.cpp",
        ("plan_norm_forward(): threads, scratch;", "run_norm_forward(): rows over threads"),
        ("backward.cpp: chunks of rows over threads",),
    ),
    (
        "registers",
        "csrc/cpu/vec.h",
        ("a row: sum of squares, rstd, scale, store",),
        ("a row: two sums, then dx; dweight added up",),
    ),
)

WIDTH, LEFT, LINE, GAP = 460, 14, 19, 16
COLOURS = {"python": "#eef2ff", "torch": "#fff4e0", "csrc": "#e9f7ef"}
TEXT, FAINT, FORWARD, BACKWARD = "#1b1f24", "#57606a", "#1f4fbf", "#a3341f"


def draw() -> str:
    """The picture as text."""
    parts, top = [], 12
    for number, (layer, file, forward, backward) in enumerate(STAGES):
        height = LINE * (1 + len(forward) + len(backward)) + 12
        colour = COLOURS[file.partition("/")[0] or "torch"]
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH - 2 * LEFT}" height="{height}" rx="6" '
            f'fill="{colour}" stroke="#8c959f"/>'
        )
        y = top + LINE
        parts.append(_text(LEFT + 12, y, layer, TEXT, weight="bold"))
        parts.append(_text(WIDTH - LEFT - 12, y, file, FAINT, anchor="end", size=12))
        for lines, colour in ((forward, FORWARD), (backward, BACKWARD)):
            for line in lines:
                y += LINE
                parts.append(_text(LEFT + 12, y, line, colour))
        top += height
        if number < len(STAGES) - 1:
            parts += [
                _arrow(WIDTH / 2 - 60, top, top + GAP, "arguments"),
                _arrow(WIDTH / 2 + 20, top + GAP, top, "results"),
            ]
            top += GAP
    legend = top + 24
    parts.append(_text(LEFT, legend, "blue: forward", FORWARD))
    parts.append(_text(LEFT + 130, legend, "red: backward, called by autograd", BACKWARD))
    height = legend + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif">'
    )
    return "\n".join(
        [head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>\n"]
    )


def _text(x, y, text, colour, *, anchor="start", size=14, weight="normal") -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _arrow(x: float, begin: float, end: float, label: str) -> str:
    back = 5 if end < begin else -5  # from the tip
    return (
        f'<path d="M{x:g} {begin:g}V{end:g}M{x - 4:g} {end + back:g}L{x:g} {end:g}'
        f'L{x + 4:g} {end + back:g}" fill="none" stroke="{FAINT}"/>'
        + _text(x + 8, (begin + end) / 2 + 4, label, FAINT, size=11)
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
