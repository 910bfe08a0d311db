"""Writes docs/llms.txt (llmstxt.org) from the menu: what each page is about, for language models.

    python docs/llms_txt.py

As a hook of mkdocs (`hooks` in mkdocs.yml) it puts each page's source beside the page, where the
file's links lead on the site as they do in this folder.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parent
FILE = DOCS / "llms.txt"
MENU = DOCS.parent / "mkdocs.yml"
OPTIONAL = "Contributors"  # what may be left out where room is short
HEAD = """# onepass

> Fused attention, norms, linear layers, dropout and optimizers for PyTorch models that exist
> already: `onepass.swap(model)` puts them in, reports what it changed, and can be undone. CPU
> kernels have been measured; CUDA kernels have run in an emulator alone.

Docstrings in `python/onepass` describe every public function, each with an example. The links lead
to Markdown and notebooks.
"""


def text() -> str:
    """What the file has to hold."""
    menu = MENU.read_text(encoding="utf-8").partition("\nnav:\n")[2]
    sections: dict[str, list[str]] = {}
    here = "Start"
    for indent, title, path in re.findall(r"^( *)- ([^:\n]+):(?: (\S+))?$", menu, re.M):
        if not path:
            here = title
        else:
            section = here if len(indent) > 2 else "API" if title == "API" else "Start"
            sections.setdefault(section, []).append(f"- [{title}]({path}): {about(DOCS / path)}")
    if OPTIONAL in sections:
        sections["Optional"] = sections.pop(OPTIONAL)
    parts = [f"## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items()]
    return "\n".join([HEAD, *parts])


def about(page: Path) -> str:
    """Its first sentence and its headings."""
    source = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(source)["cells"]
        told = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        source = "\n\n".join(told)
    visible = re.sub(
        r"^```.*?^```|<!--.*?-->|^Tested with .*?\d\.(?= |$)", "", source, flags=re.S | re.M
    )
    (paragraph, *_) = re.findall(r"^ ?(?!#|[-|!`>]{2}|- |\||!|\s)(.+)$", visible, re.M)
    first = re.match(r".+?(?=[.:]$|\. )", paragraph)[0]
    first = re.sub(r"\[([^]]+)\]\([^)]+\)|\*\*([^*`]+)\*\*", r"\1\2", first).rstrip("*")
    headings = re.findall(r"^## (.*)$", visible, re.M)
    return ". ".join([first, "; ".join(headings)] if headings else [first])


def on_post_build(config, **_) -> None:
    for page in (*DOCS.rglob("*.md"), *DOCS.glob("notebooks/*.ipynb")):
        beside = Path(config["site_dir"]) / page.relative_to(DOCS)
        beside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, beside)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
