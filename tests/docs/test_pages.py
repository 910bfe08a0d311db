"""README.md and docs/: their code runs, their links work, and generated parts are current."""

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import onepass
from onepass import distributed, functional, nn, optim

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
OF_THE_CODE = [page for page in PAGES if page.stem in ("design", "recipes", "distributed")]
MODULES = {  # whose names differ from their packages'
    "pytorch-lightning": "pytorch_lightning",
    "sentence-transformers": "sentence_transformers",
}
# (name, object) of every public name.
PUBLIC = [
    (f"{module.__name__}.{name}", getattr(module, name))
    for module in (onepass, distributed, functional, nn, optim)
    for name in module.__all__
    if not isinstance(getattr(module, name), ModuleType)
]
# Modules of onepass.integrations, and the packages without which they cannot be imported.
INTEGRATIONS = {
    "flash_attn.flash_attn_interface": "", "flash_attn.bert_padding": "",
    "flash_attn.layers.rotary": "", "lightning": "pytorch_lightning", "peft": "peft",
    "timm": "timm", "torchtitan": "torchtitan", "transformers": "transformers",
}  # fmt: skip


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path) -> list[str]:
    """The visible Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def packages_of(page: Path) -> dict[str, str]:
    """The packages in a page's line "Tested with", and their versions."""
    line = re.search(r"^Tested with (.*)\.$", page.read_text(encoding="utf-8"), re.M)
    return dict(re.findall(r"([\w-]+) (\d[\d.]*\d)", line[1])) if line else {}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page):
    """From top to bottom, in one namespace, invisible blocks included."""
    markdown = pytest.importorskip(
        "sybil.parsers.markdown", reason="sybil, of the test extra, finds the code in a page"
    )
    from sybil import Sybil

    for name in packages_of(page):
        module = MODULES.get(name, name)
        pytest.importorskip(module, reason=f"{name} is not installed", exc_type=ImportError)

    parsers = [markdown.PythonCodeBlockParser()]
    document = Sybil(parsers, pattern="*.md", path=str(page.parent)).parse(page)
    examples = list(document.examples())
    assert len(examples) > len(blocks(page))  # one sets the page up
    for example in examples:
        example.evaluate()


def test_the_readme_shows_what_runs():
    assert blocks(README) == blocks(DOCS / "index.md")[-1:]


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert "://" in target or other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}


def test_every_page_is_in_the_readme_or_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": {page.relative_to(DOCS).as_posix()}\n" in menu for page in PAGES)


@pytest.mark.parametrize("page", sorted(DOCS.glob("integrations/*.md")), ids=lambda page: page.stem)
def test_a_page_names_the_versions_that_the_tests_run_with(page):
    files = (ROOT / "pyproject.toml", ROOT / "tests/integrations/requirements.txt")
    texts = [file.read_text("utf-8") for file in files]
    pins = dict(re.findall(r"\b([\w-]+)==([\d.]+\d)", " ".join(texts)))
    tested = packages_of(page)
    assert all(pins.get(name, version) == version for name, version in tested.items())


@functools.cache
def words_of_the_code() -> set[str]:
    folders = ("csrc", "python", "tests", "cmake", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.*")]
    code = (".py", ".h", ".cpp", ".cuh", ".cu", ".cmake")
    texts = [f.read_text("utf-8") for f in files if f.suffix in code and f != Path(__file__)]
    names = [file.name for file in files]
    return set(re.findall(r"\w+", " ".join(texts + names)))


@pytest.mark.parametrize("page", OF_THE_CODE, ids=lambda page: page.stem)
def test_a_page_on_the_code_names_what_is_there(page):
    """Files, folders and names of the code, wherever they are between backticks."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M)
    named = re.findall(r"`([\w./<>*:]+)`", text)
    paths = [name for name in named if "/" in name and not name.startswith("torch/")]
    for path in paths:
        example = re.sub(r"<\w+>", "lion" if "optim/" in path else "gate", path)
        assert (ROOT / example).exists(), path
    for name in (name for name in named if re.fullmatch(r"\w+((\.|::)\w+)*", name)):
        if not (ROOT / name).exists():
            unknown = set(re.findall(r"\w+", name)) - words_of_the_code()
            assert not unknown, name


SWAPPING = ("classes", "gated", "matchers", "specs")
# By the title of a recipe: a pattern that finds its newest example, the stem of the example's own
# files, and files that match for other reasons.
RECIPES = {
    "A new family": (
        r"\bgate_forward|GatedMLP|gated_activation",
        "gate",
        {f"python/onepass/swapping/{name}.py" for name in SWAPPING}  # blocks of others
        | {"python/onepass/tools/compare/attribution.py"}  # the part of a step that it is
        | {"python/onepass/integrations/transformers/kernels.py"},  # layers that are made of it
    ),
    "A new norm": (
        r"\bkRms\b|NormKind\.RMS|\bNormKind\b.*RMS|\brms_norm\b|\bRMSNorm\b(?!Forward)",
        "",
        # a measurement; norms in front of a rotation; a stock model, below
        {"csrc/cpu/parallel.h", "python/onepass/reference/rotary.py"}
        | {"python/onepass/integrations/torchtitan.py"}
        | {f"python/onepass/integrations/transformers/{n}.py" for n in ("__init__", "kernels")}
        | {
            f"python/onepass/tools/{name}.py"
            for name in ("model", "compare/attribution", "compare/report", "compare/settings")
        },
    ),
    "A new score term of attention": (
        r"softcap\b",
        "",
        {"csrc/ops/loss.h", "csrc/ops/loss.cpp", "csrc/cpu/loss.cpp", "csrc/cuda/loss.cu"}
        | {"csrc/ops/check.h"}  # the rule that losses have too
        | {"python/onepass/_ops/linear_loss.py", "python/onepass/functional/_internal.py"}
        | {"python/onepass/integrations/transformers/lazy_logits.py"}
        | {f"python/onepass/_dtensor/{name}.py" for name in ("losses", "rules")}
        | {f"python/onepass/{name}/loss.py" for name in ("_ops", "functional", "nn", "reference")},
    ),
    "A new optimizer": (
        r"Lion\b|\blion",
        "lion",
        # In a docstring; a line of a table that shows some.
        {
            "python/onepass/integrations/transformers/trainer.py",
            "python/onepass/tools/estimate/optimizers.py",
            "python/onepass/integrations/timm.py",
        },
    ),
    "A new optimizer of whole tensors": (
        r"LAMB\b|\blamb\b", "lamb", {"python/onepass/integrations/timm.py"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_names_the_files_of_its_example(title):
    """Every file of the product that names the example is in the recipe; tables hold no others."""
    known, example, others = RECIPES[title]
    page = (DOCS / "recipes.md").read_text("utf-8").partition(f"\n## {title}\n")[2]
    section = re.sub(r"<\w+>", example, page.partition("\n## ")[0])
    named = set(re.findall(r"`((?:csrc|python)/[\w./]+)`", section))
    product = [f for top in ("csrc", "python") for f in (ROOT / top).rglob("*.*")]
    code = (".py", ".h", ".cpp", ".cuh", ".cu")
    found = set()
    for file in (file for file in product if file.suffix in code):
        # Examples in docstrings may use any function.
        examples = r'^ *>>>.*?(?=^\s*$|""")'  # with what they print
        text = re.sub(examples, "", file.read_text("utf-8"), flags=re.M | re.S)
        if file.stem == example or re.search(known, text):
            found.add(file.relative_to(ROOT).as_posix())
    assert found - others <= named, sorted(found - others - named)
    rows = "\n".join(line.split(" | ")[0] for line in section.splitlines() if line[:2] == "| ")
    in_tables = set(re.findall(r"`((?:csrc|python)/[\w./]+)`", rows))
    assert in_tables <= found, sorted(in_tables - found)
    numbers = (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    )
    numbers += " fifteen sixteen seventeen eighteen nineteen twenty"
    (said,) = re.findall(r"\b([A-Z]\w+) files\b", section)
    assert numbers.split().index(said.lower()) == len(in_tables)


def test_the_drawing_of_a_call_is_current():
    drawing = load(DOCS / "call_drawing.py")
    assert drawing.PICTURE.read_text("utf-8") == drawing.draw(), "docs/call_drawing.py writes it"
    for _, file, forward, backward in drawing.STAGES:
        functions = re.findall(r"(\w+)\(\)", " ".join(forward + backward))
        source = (ROOT / file).read_text("utf-8") if file else ""
        assert all(re.search(rf"\b{function}\(", source) for function in functions), file


def test_llms_txt_is_current():
    made = load(DOCS / "llms_txt.py")
    text = made.FILE.read_text("utf-8")
    assert made.text() == text, "make docs writes it"
    assert re.match(r"# \S.*\n\n(> .*\n)+\n", text), "a title, and a summary as a quotation"
    items = re.findall(r"^- (.*)$", text, re.M)
    found = [re.fullmatch(r"\[[^]]+\]\((\S+\.(?:md|ipynb))\): \S.*", item) for item in items]
    assert all(found), "a link and what is there"
    assert {DOCS / one[1] for one in found} == {*PAGES, *DOCS.glob("notebooks/*.ipynb")}


def test_the_table_of_operators_is_current():
    matrix = load(DOCS / "support_matrix.py")
    tables = matrix.tables()
    assert set(tables) == {README, DOCS / "operators.md"}
    for page, lines in tables.items():
        text = page.read_text(encoding="utf-8")
        assert matrix.with_table(text, lines) == text, "make docs writes it"
    assert len(tables[README]) <= 10, "the README has groups of operators"
    rows = {name for calls, *_ in matrix.ROWS for name in calls}
    assert set(functional.__all__) <= rows
    assert {f"optim.{name}" for name in optim.__all__} - rows == {
        "optim.fuse", "optim.fused_accumulate", "optim.muon_groups",
    }  # fmt: skip


def test_a_line_of_the_readme_is_true_of_its_whole_group():
    matrix = load(DOCS / "support_matrix.py")
    first, second = (matrix.Row((name,), "group", ("yes",)) for name in ("first", "second"))
    assert list(matrix.by_group([first, second])) == ["| group | yes |"]
    with pytest.raises(SystemExit, match="second must have a group other than 'group'"):
        list(matrix.by_group([first, second._replace(cells=("no",))]))


def test_the_readme_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 85
    plain = re.sub(r"^```.*?^```|^\|.*?$", "", text, flags=re.S | re.M)
    for paragraph in plain.split("\n\n"):
        assert paragraph.startswith("- ") or paragraph.count("\n") < 3, paragraph
        for row in paragraph.splitlines():
            shown = re.sub(r"\]\([^)]+\)", "]", row)  # the targets of links are not read
            assert len(shown) <= 160, row


def test_the_api_has_every_public_name():
    listed = set(re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M))
    assert listed == {f"{one.__module__}.{one.__qualname__}" for _, one in PUBLIC}


def names_of(module: str) -> list[str]:
    """The names in the __all__ of an integration, by its source: its package may be missing."""
    path = ROOT / "python" / "onepass" / "integrations" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    listed = re.search(r"^__all__ = (\[.*?\])", path.read_text("utf-8"), re.M | re.S)[1]
    return [name for name in ast.literal_eval(listed) if not name.isupper()]


def test_the_reference_has_every_name_of_the_integrations():
    """A line of some page is `::: onepass.integrations.MODULE.NAME`."""
    folder = ROOT / "python" / "onepass" / "integrations"
    modules = {
        ".".join(f.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for f in folder.rglob("*.py")
        if "\n__all__ = [" in f.read_text("utf-8")
    }
    assert modules - {"flash_attn.ops.triton.rotary"} == set(INTEGRATIONS)
    listed = [
        name
        for page in PAGES
        for name in re.findall(r"^::: onepass\.integrations\.(\S+)$", page.read_text("utf-8"), re.M)
    ]
    for module in INTEGRATIONS:
        for name in names_of(module):
            name = {"Swap": "SwapHooks"}.get(name, name)  # which has its docstring
            found = [one for one in listed if one.startswith(module) and one.endswith(f".{name}")]
            assert len(found) == (name != "apply_rotary_emb_func"), f"{module}.{name}"


@pytest.mark.parametrize(
    "module, name", [(module, name) for module in INTEGRATIONS for name in names_of(module)]
)
def test_the_example_of_an_integration_runs(module, name):
    package = INTEGRATIONS[module]
    if package:
        reason = f"{package} is not installed"
        pytest.importorskip(package, reason=reason, exc_type=ImportError)
    if name == "register_kernels":
        from transformers.utils import is_kernels_available

        if not is_kernels_available():
            pytest.skip("the package kernels is not installed, or not as transformers takes it")
    imported = importlib.import_module(f"onepass.integrations.{module}")
    test_the_example_of_a_docstring_runs(getattr(imported, name))


@pytest.mark.parametrize("of", [one for _, one in PUBLIC], ids=[name for name, _ in PUBLIC])
def test_the_example_of_a_docstring_runs(of):
    """A typical call, in three to six statements and lines of results."""
    text = inspect.getdoc(of).partition("\nExamples:\n")[2]
    example = doctest.DocTestParser().get_doctest(
        textwrap.dedent(text), {"torch": torch, "onepass": onepass}, of.__qualname__, None, 0
    )
    assert example.examples, "no example"
    said = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("material", reason="the theme of the pages, of the docs extra")
    pytest.importorskip("mkdocstrings", reason="reads the docstrings, of the docs extra")
    pytest.importorskip("mkdocs_jupyter", reason="shows the notebooks, of the docs extra")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (notebook, *_) = DOCS.glob("notebooks/*.ipynb")
    sources = ("llms.txt", "swap.md", "integrations/timm.md", f"notebooks/{notebook.name}")
    for served in sources:
        assert (tmp_path / served).read_text("utf-8") == (DOCS / served).read_text("utf-8")
    api = (tmp_path / "api/index.html").read_text("utf-8")
    for name in ("swapping.engine.swap", "optim.adam.AdamW"):  # whose docstrings are composed
        section = api.partition(f'id="onepass.{name}"')[2].partition('<div class="doc doc-object')[
            0
        ]
        assert "Examples:" in section, name


def test_the_picture_and_the_table_are_of_the_same_run():
    figures = load(ROOT / "benchmarks" / "figures.py")
    measured = json.loads(figures.COMPARE.read_text(encoding="utf-8"))
    ratios = [of["variants"]["swapped"]["ratio_to_stock"] for of in measured["speed"]]
    picture = (figures.IMAGES / "compare.svg").read_text(encoding="utf-8")
    for ratio in ratios:
        assert f"{ratio['median']:.2f}x [{ratio['low']:.2f}-{ratio['high']:.2f}]" in picture
    row = " / ".join(f"{ratio['median']:.2f}" for ratio in ratios)
    assert f"| GPT, training step, dropout 0.1 / none | {row} |" in README.read_text("utf-8")


def test_the_picture_is_drawn(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="draws it; not in a plain install")
    settings = dict(matplotlib.rcParams)
    figures = load(ROOT / "benchmarks" / "figures.py")
    measured = json.loads(figures.COMPARE.read_text(encoding="utf-8"))
    for label, parts in figures.bars(measured):
        name = label.rpartition(" ")[2]
        steps = [of["variants"][name]["step_ms"]["median"] for of in measured["speed"]]
        assert any(abs(sum(parts) - step) < 1e-6 * step for step in steps)
    figures.draw_compare(measured, tmp_path / "compare.svg")
    assert dict(matplotlib.rcParams) == settings  # unchanged, for other pictures of this process
    assert "linear layers" in (tmp_path / "compare.svg").read_text(encoding="utf-8")
