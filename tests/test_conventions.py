"""The house rules, as tests: who may include whom, which files a family has, what was forgotten."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

import onepass

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "onepass"
FAMILIES = ("norm", "dropout")
MAX_LINES = 600


def tracked(*patterns: str) -> list[Path]:
    """Files of the checkout: tracked, and new ones that are not ignored."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run([*command, *patterns], capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a git checkout")
    return [path for line in result.stdout.splitlines() if (path := ROOT / line).is_file()]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def sources(folder: str) -> list[Path]:
    return [p for p in (CSRC / folder).rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]


# ---- layers -------------------------------------------------------------------------------------

# What a folder's files may include of the project, and which outside headers they must not.
LAYERS = {
    "core": (r"core/", r"torch|cuda|ATen|c10|pybind11|Python"),
    "cpu": (r"core/|cpu/|ops/(backend|{families})\.h", r"torch|cuda|ATen|c10|pybind11|Python|omp"),
    "cuda": (r"core/|cuda/|ops/(backend|{families})\.h", r"torch|ATen|c10|pybind11|Python"),
    "ops": (r"core/|ops/", r"cuda|ATen|c10|pybind11|Python|torch/(?!csrc/stable|headeronly|csrc/"
            r"inductor/aoti_torch/c/shim\.h)"),
}  # fmt: skip


@pytest.mark.parametrize("folder", LAYERS)
def test_layers(folder):
    allowed, forbidden = LAYERS[folder]
    allowed = allowed.replace("{families}", "|".join(FAMILIES))
    files = sources(folder)
    assert files
    for path in files:
        for header in includes(path):
            own = (CSRC / header).exists()
            rule = re.match(allowed, header) if own else not re.match(forbidden, header)
            assert rule, f"{path.relative_to(ROOT)} must not include {header}"


def test_bindings_know_no_tensors():
    for header in includes(CSRC / "bindings.cpp"):
        assert not re.match(r"torch|ATen|c10|cpu/", header), header


def test_no_instruction_sets_outside_the_simd_layer():
    for path in sources("cpu"):
        if path.name not in {"vec.h", "random.h", "ceilings.cpp"}:
            assert not re.search(r"__AVX|_mm\d*_", path.read_text()), path.name


def test_no_abort_printf_or_openmp():
    pattern = r"\b(printf|fprintf|abort|exit|assert)\s*\(|std::cout|std::cerr|#pragma omp"
    for path in [CSRC / "bindings.cpp", *(p for folder in LAYERS for p in sources(folder))]:
        found = re.search(pattern, path.read_text())
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]}"


def test_python_layers():
    for path in (PACKAGE / "functional").glob("*.py"):
        assert "torch.ops" not in path.read_text(), path.name
    for path in (PACKAGE / "nn").glob("*.py"):
        assert "torch.ops" not in path.read_text(), path.name
    for path in (PACKAGE / "reference").glob("*.py"):
        text = path.read_text()
        assert "_ops" not in text and "torch.ops" not in text, path.name


# ---- families -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "place",
    [
        "csrc/ops/{}.h",
        "csrc/ops/{}.cpp",
        "csrc/cpu/{}*",
        "python/onepass/_ops/{}.py",
        "python/onepass/functional/{}.py",
        "python/onepass/nn/{}.py",
        "python/onepass/reference/{}.py",
        "python/onepass/bench/{}.py",
        "tests/test_{}.py",
    ],
)
def test_a_family_is_complete(family, place):
    assert list(ROOT.glob(place.format(family))), place.format(family)


def test_no_family_is_forgotten_here():
    found = {
        path.stem for path in (PACKAGE / "_ops").glob("*.py") if "register_fake" in path.read_text()
    }
    assert found == set(FAMILIES)


def operators() -> list[str]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return sorted(name for name in names if name.startswith("onepass::"))


def test_every_operator_has_a_kernel_a_fake_and_a_test():
    assert len(operators()) >= 5
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in operators():
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if name.endswith("_check"):
            assert has(name, "CompositeExplicitAutograd")
            continue
        assert has(name, "CPU"), f"{name} has no CPU kernel"
        assert has(name, "Meta"), f"{name} has no fake"
        assert f"opcheck(torch.ops.{name.replace('::', '.')}" in tests, f"{name} has no opcheck"


def test_schemas_are_ready_for_compilation():
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("onepass::"):
            for argument in schema.arguments:
                if argument.name.endswith("shape") or argument.name.startswith("max_"):
                    assert "SymInt" in str(schema), f"{schema.name}: {argument.name}"
            assert all(value.alias_info is None for value in schema.returns), schema.name


def test_every_message_is_tested():
    """Each `require(...)` of ops/ says `<argument> must <rule>`, and some test matches that."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    tests = tests.replace("\\", "")
    for path in sources("ops"):
        text = re.sub(r'"\s*\n\s*"', "", path.read_text())
        for rule in re.findall(r'must ([a-z][a-z0-9 ]+?)(?:[",(]| of |$)', text):
            words = " ".join(rule.split()[:3])
            assert f"must {words}" in tests, f"{path.name}: 'must {rule}' is not tested"


# ---- the package --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [onepass, onepass.functional, onepass.nn])
def test_public_names_are_documented(module):
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__doc__, f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize("function", onepass.functional.__all__)
def test_public_functions_say_shapes_and_errors(function):
    text = getattr(onepass.functional, function).__doc__
    assert "Args:" in text or "Arguments" in text
    assert "Raises:" in text or "errors" in text


def test_files_are_no_longer_than_a_screenful_of_screens():
    for path in tracked("*.py", "*.cpp", "*.h", "*.cu", "*.cuh"):
        lines = path.read_text().count("\n")
        assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it by topic"


def test_no_machine_paths_and_no_hosts():
    pattern = re.compile(
        r"/(?:root|home/\w+|work)/|pypi\.(?:org|io)|pythonhosted\." + r"org|deb" + r"ian\.org"
    )
    for path in tracked():
        if path.suffix in {".png", ".so"} or path.name == Path(__file__).name:
            continue
        found = pattern.search(path.read_text(errors="replace"))
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]}"


def test_formatters_are_pinned_alike():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    extra = (ROOT / "pyproject.toml").read_text()
    for tool in ("ruff", "clang-format"):
        pins = set(re.findall(rf"{tool}==([\d.]+)", hooks + extra))
        assert len(pins) == 1, f"{tool}: {pins}"
