"""The rules of the house as tests: who may include whom, and the files of an operator family.

A failure names the missing part.
"""

import ast
import graphlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import onepass
from tests.emulator.executors import operators

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PYTHON = ROOT / "python" / "onepass"
CODE = (".py", ".cpp", ".h", ".cu", ".cuh")
MAX_LINES = 600


def project_files() -> list[Path]:
    """Files that git tracks or would track; without git everything outside build folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        folders = ("csrc", "python", "tests", "notebooks", "benchmarks", "cmake", "build_backend")
        files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    return [file for file in files if file.is_file() and "__pycache__" not in file.parts]


def declaring() -> list[Path]:
    """The files of csrc/ops that declare operators."""
    lists = re.compile(r"^OperatorList \w+_operators\(\) {$", re.MULTILINE)
    return sorted(file for file in (CSRC / "ops").glob("*.cpp") if lists.search(file.read_text()))


def families() -> list[str]:
    """Their stems, without parts of a family: <family>_<part>."""
    stems = [file.stem for file in declaring()]
    return [stem for stem in stems if not any(stem.startswith(f"{other}_") for other in stems)]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


# ---- who may include whom -----------------------------------------------------------------------


def includes(file: Path) -> list[tuple[str, bool]]:
    """(header, whether in quotes) of each include in the file."""
    found = re.findall(r'^\s*#\s*include\s+(?:<([^>]+)>|"([^"]+)")', file.read_text(), re.MULTILINE)
    return [(angle or quoted, bool(quoted)) for angle, quoted in found]


def reached(file: Path) -> dict[str, list[str]]:
    """Every header outside the project that `file` includes indirectly, with the path to it."""
    outside, seen, todo = {}, set(), [(file, [relative(file)])]
    while todo:
        here, way = todo.pop()
        for name, quoted in includes(here):
            if not quoted:
                outside.setdefault(name, way)
                continue
            header = CSRC / name
            assert header.is_file(), f"{relative(here)} includes {name}, which is not in csrc/"
            if header not in seen:
                seen.add(header)
                todo.append((header, [*way, name]))
    return outside


def sources(folder: str) -> list[Path]:
    return [file for file in sorted((CSRC / folder).rglob("*")) if file.suffix in CODE]


TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/")
CUDA = re.compile(r"(cuda(?!_emulator)|cublas|curand|cooperative_groups|cub/|mma\.h|nv)")
STABLE = re.compile(r"torch/(csrc/stable/|headeronly/|csrc/inductor/aoti_torch/c/shim\.h$)")
FORBIDDEN = {"core": (TORCH, CUDA), "cpu": (TORCH, CUDA), "cuda": (TORCH,), "ops": (CUDA,)}
ALLOWED = {"core": "core/", "cpu": ("core/", "cpu/", "ops/"), "cuda": ("core/", "cuda/", "ops/")}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_includes(folder):
    """Torch only through its stable ABI, and headers of lower layers."""
    for file in sources(folder):
        for header, way in reached(file).items():
            bad = any(pattern.match(header) for pattern in FORBIDDEN[folder])
            assert not bad, f"<{header}> reaches {' <- '.join(way[::-1])}"
        for header, quoted in includes(file):
            is_stable = not TORCH.match(header) or STABLE.match(header)
            is_lower = not quoted or header.startswith(ALLOWED.get(folder, ""))
            assert is_stable and is_lower, f"{relative(file)} includes {header}"


def test_bindings_know_no_torch():
    for header, way in reached(CSRC / "bindings.cpp").items():
        assert not header.startswith(("torch/", "ATen/", "c10/")), f"<{header}> reaches {way}"


def test_families_do_not_include_each_other():
    for family in families():
        for back_end in ("cpu", "cuda"):
            for other in (f for f in families() if f != family):
                own = [CSRC / back_end / f"{family}.{s}" for s in ("cpp", "cu", "h", "cuh")]
                files = [f for f in own if f.is_file()] + sources(f"{back_end}/{family}")
                for file in files:
                    for header, _ in includes(file):
                        foreign = re.match(rf"(cpu|cuda|ops)/{other}[./]", header)
                        assert not foreign, f"{relative(file)} includes {header}"


SIMD = ("vec.h", "vec_bytes.h", "vec_squares.h", "vec_two.h", "random.h", "ceilings.cpp")
LAYERS = ("core", "cpu", "cuda", "ops", "bindings.cpp")
BANNED = {  # what may not stand in these folders, but for these files
    "instruction sets outside the SIMD layer": (r"__AVX\w*|\b_mm\d*_\w+", ("cpu",), SIMD),
    # g++ alone has it; clang, with which onepass builds too, has another.
    "builtins of one compiler": (r"__builtin_shuffle\(", ("",), ()),
    "abort, printf or OpenMP": (
        r"\b(printf|fprintf|abort|exit|assert)\s*\(|std::cout|std::cerr|#\s*pragma omp", LAYERS, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BANNED)
def test_what_is_banned(name):
    pattern, folders, exempt = BANNED[name]
    for folder in folders:
        for file in [CSRC / folder] if folder.endswith(".cpp") else sources(folder):
            found = file.name not in exempt and re.search(pattern, file.read_text())
            assert not found, f"{relative(file)}: {found[0]}"


# Rooms of the package, from the lowest. A file imports from its own room and from lower ones.
ROOMS = (
    "", "_ops", "_dtensor", "_policy", "functional", "nn", "optim", "distributed", "swapping",
    "quantizing", "integrations", "commands", "tools",
)  # fmt: skip
COMMANDS = ("explain", "estimating", "cli", "__main__")
# These import tools at a call: to print, to measure, to run a step without data.
AT_THE_CALL = ("explain.py", "estimating/__init__.py", "swapping/sample.py")


def imports() -> dict[str, set[str]]:
    """Files of the package by the files that they import, wherever the import stands. The root's
    own names (`onepass._C`, `onepass.__version__`) do not count."""
    files = {relative(file).removeprefix("python/onepass/") for file in PYTHON.rglob("*.py")}

    def file_of(name: str) -> str | None:
        path = "/".join(name.split(".")[1:])
        return next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in files), None)

    found = {}
    for file in files:
        names = []
        for node in ast.walk(ast.parse((PYTHON / file).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onepass"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    names.append(inner if file_of(inner) else node.module)
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names if alias.name.startswith("onepass.")]
        found[file] = {file_of(name) for name in names} - {None, file}
    return found


def room_of(file: str) -> int:
    first = file.split("/")[0].removesuffix(".py")
    return ROOMS.index("commands" if first in COMMANDS else first if first in ROOMS else "")


def test_no_import_circle():
    order = graphlib.TopologicalSorter(imports())
    order.prepare()  # names the files of a circle


def test_no_import_from_a_higher_room():
    for file, used in imports().items():
        for other in used:
            is_tool = other.startswith("tools/") and file in AT_THE_CALL
            if file in ("__init__.py", "checkpointing.py") or is_tool:
                continue
            assert room_of(other) <= room_of(file), f"{file} imports {other}"


def test_a_model_imports_no_tools():
    code = "import sys, onepass; print([m for m in sys.modules if m.startswith('onepass.tools')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_python_layers():
    forbidden = {
        "functional": ("torch.ops",),
        "nn": ("torch.ops", "onepass._ops", "onepass._C"),
        "optim": ("torch.ops", "onepass.functional", "onepass.nn"),
        "_policy": ("torch.ops.onepass",),
        "reference": ("torch.ops", "onepass._ops"),
    }
    for folder, names in forbidden.items():
        for file in sorted((PYTHON / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom):
                    used = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    used = [alias.name for alias in node.names]
                elif isinstance(node, ast.Attribute):
                    used = [ast.unparse(node)]
                else:
                    continue
                for name in names:
                    bad = [use for use in used if f"{use}.".startswith(f"{name}.")]
                    assert not bad, f"{relative(file)}:{node.lineno} uses {bad[0]}"


def test_checks_live_in_ops_alone():
    # These refuse a wrong declaration, at import.
    declaring = {PYTHON / "_ops" / name for name in ("operator.py", "autograd.py")}
    for file in sorted({*(PYTHON / "_ops").glob("*.py")} - declaring):
        raised = [
            n.lineno for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Raise)
        ]
        assert not raised, f"{relative(file)}:{raised[0]} raises: checks belong into csrc/ops"


# Files whose tensors follow torch's default device, with the reason.
ON_THE_DEFAULT_DEVICE = {"tools/model.py": "layers of a model that a process of ours makes"}


def makes_on_the_default_device(call: ast.AST) -> bool:
    """Whether this is a call of torch that makes tensors and names no device."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    if any(keyword.arg in (None, "device") for keyword in call.keywords):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    if owner == "torch":
        return name in {function.__name__ for function in _device_constructors()}
    layer = getattr(torch.nn, name, None) if owner in ("nn", "torch.nn") else None
    return inspect.isclass(layer) and "device" in inspect.signature(layer).parameters


def test_new_tensors_name_their_device():
    """`torch.set_default_device` may name another device than that of a user's tensors."""
    found = {}
    for file in sorted(PYTHON.rglob("*.py")):
        for node in filter(makes_on_the_default_device, ast.walk(ast.parse(file.read_text()))):
            found.setdefault(file.relative_to(PYTHON).as_posix(), node.lineno)
    unnamed = {name: line for name, line in found.items() if name not in ON_THE_DEFAULT_DEVICE}
    assert not unnamed, f"calls without device=, with their lines: {unnamed}"
    assert set(ON_THE_DEFAULT_DEVICE) <= set(found), "an exemption that nothing needs"


# ---- the files of a family ----------------------------------------------------------------------


def test_families_are_found():
    assert {"norm", "dropout", "linear"} <= set(families())


# Families that are not functions of a model's forward.
INTERFACES = {
    "optimizer": ("python/onepass/optim/__init__.py",),
    "causal_conv": ("python/onepass/functional/causal_conv.py",),  # models hold an nn.Conv1d
    "selective_scan": ("python/onepass/functional/selective_scan.py",),  # within a Mamba layer
    "mamba_chunk_scan": ("python/onepass/functional/mamba_chunk_scan.py",),  # likewise
    "delta_rule": ("python/onepass/functional/delta_rule.py",),  # within an attention layer
}


# Families whose kernels are those of another: a quantised weight is a factor of linear's products.
KERNELS = {"quantized_linear": "csrc/cpu/linear/few_rows_of_codes.cpp"}
FORMS_OF_NORM = ("modulated_norm", "branch")  # tests/norm has them


@pytest.mark.parametrize("family", families())
def test_a_family_is_complete(family):
    wanted = [
        f"csrc/ops/{family}.h",
        KERNELS.get(family, f"csrc/cpu/{family}.cpp|csrc/cpu/{family}/"),
        f"python/onepass/_ops/{family}.py",
        *INTERFACES.get(
            family, (f"python/onepass/functional/{family}.py", f"python/onepass/nn/{family}.py")
        ),
        f"python/onepass/reference/{family}.py",
        f"python/onepass/tools/bench/families/{family}.py",
        f"tests/{'norm' if family in FORMS_OF_NORM else family}/",
    ]
    missing = [
        want for want in wanted if not any((ROOT / choice).exists() for choice in want.split("|"))
    ]
    assert not missing, f"{family} has no {', '.join(missing)}"


def declared_ops() -> list[str]:
    """All declared operators, except those for traces, which are made of them."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("onepass::")]
    return sorted(name for name in names if not has(name, "CompositeImplicitAutograd"))


def test_every_schema_of_the_sources_is_registered():
    text = "".join(file.read_text().partition("_operators() {")[2] for file in declaring())
    written = set()
    for functions, name in re.findall(r'entry<([^"]*)>\(\s*"(\w+)', text):
        written |= {name, f"{name}_check"} if "," in functions else {name}
    assert {f"onepass::{name}" for name in written} == set(declared_ops())


@pytest.mark.parametrize("name", declared_ops())
def test_every_schema_has_a_cpu_kernel_and_a_fake(name):
    def has(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    if has("CompositeExplicitAutograd"):
        return  # one kernel for every back end: checks, which return nothing
    assert has("CPU"), f"{name} has no CPU kernel"
    assert has("Meta"), f"{name} has no fake (torch.library.register_fake)"


@pytest.mark.parametrize("name", declared_ops())
def test_sizes_in_schemas_are_symbolic(name):
    """A plain int specialises compiled graphs; only masks and kinds may be one."""
    schema = str(torch._C._get_schema(name, ""))
    for argument in re.findall(r"\bint(?:\[\d*\])?\??\s+(\w+)", schema):
        assert argument.endswith(("_mask", "kind")), f"{name}: {argument} is an int"


@pytest.mark.parametrize("name", declared_ops())
def test_outputs_alias_nothing(name):
    schema = torch._C._get_schema(name, "")
    assert all(value.alias_info is None for value in schema.returns), f"{name} returns an alias"


# ---- messages -----------------------------------------------------------------------------------


def calls(text: str, name: str) -> list[str]:
    """The argument texts of all calls of a C++ function."""
    found = []
    for match in re.finditer(rf"\b{re.escape(name)}\(", text):
        depth, end, quoted = 1, match.end(), False
        while depth:
            character = text[end]
            if character == '"' and text[end - 1] != "\\":
                quoted = not quoted
            elif not quoted:
                depth += (character == "(") - (character == ")")
            end += 1
        found.append(text[match.end() : end - 1])
    return found


def phrases(arguments: str) -> list[str]:
    """The words of a message, without those that all messages share."""
    joined = re.sub(r'"\s*"', "", arguments)
    literals = [literal.strip(" :,") for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', joined)]
    literals = [re.sub(r",? got$", "", literal).strip(" :,") for literal in literals]
    return [literal for literal in literals if len(literal) > 5 and " " in literal]


def test_every_message_is_tested():
    tests = "".join(
        file.read_text() for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)
    )
    tests = re.sub(r'"\s*\n\s*r?f?"', "", tests).replace("\\", "")
    checked = 0
    for file in sorted((CSRC / "ops").iterdir()):
        text = re.sub(r"//[^\n]*", "", file.read_text())
        messages = calls(text, "require")
        messages += [m for m in calls(text, "throw std::runtime_error") if " must " in m]
        for message in messages:
            for phrase in phrases(message):
                checked += 1
                assert phrase in tests, f"{relative(file)}: no test of {phrase!r}"
    assert checked > 15  # the parser still finds them


def test_messages_follow_the_grammar():
    for file in sorted((CSRC / "ops").glob("*.cpp")):
        for message in calls(file.read_text(), "require"):
            joined = re.sub(r'"\s*"', "", message)
            assert " must " in joined, f"{relative(file)}: no rule in {joined}"
            assert ", got" in joined, f"{relative(file)}: no value in {joined}"


def test_every_checked_argument_has_a_message_tested_by_name():
    """A rule for several arguments is tested for each of them."""
    tests = "".join(
        file.read_text() for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)
    )
    checks = (
        r'checked(?:\(\))?\.(?:tensor|tensor_of|dtype|dropout)\(\s*"(\w+)"',
        r'CheckedAgainst checked\(op, "(\w+)"',
        r'require_(?:probability|choice|dtype)\(\w+, "(\w+)"',
        r'": (\w+) must ',
        r'\b(?:input_of|row_tensor|product)\(\w+, "(\w+)"',
        r'\b(?:index|cumulative|longest|whole|window|like_query|check_lse|writable)\("(\w+)"',
    )
    names = set()
    for file in (CSRC / "ops").iterdir():
        for pattern in checks:
            names.update(re.findall(pattern, file.read_text()))
    assert len(names) > 12  # the patterns still find them
    for name in names:
        assert re.search(rf"\b{name} must ", tests), f"no test of a message on {name}"
    schemas = [op._schema for op in operators("onepass").values()]
    arguments = {argument.name for schema in schemas for argument in schema.arguments}
    assert names - arguments == {"tensors"}, "a message is about what a schema has"


# ---- names, documentation, files ----------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [onepass, onepass.functional, onepass.nn, onepass.optim, onepass.reference]
)
def test_public_names_are_documented(module):
    assert list(module.__all__) == sorted(module.__all__), (
        f"{module.__name__}.__all__ is not sorted"
    )
    for name in module.__all__:
        member = getattr(module, name)
        own = vars(member).get("__doc__") if inspect.isclass(member) else member.__doc__
        assert own and own.strip(), f"{module.__name__}.{name} has no docstring"


def test_public_functions_describe_their_arguments():
    for name in onepass.functional.__all__:
        function = getattr(onepass.functional, name)
        text = inspect.getdoc(function)
        # A function may point to a sibling that describes the arguments they share.
        for sibling in re.findall(r"`(?:onepass\.functional\.)?(\w+)`", text):
            if sibling in onepass.functional.__all__:
                text += inspect.getdoc(getattr(onepass.functional, sibling))
        for argument in inspect.signature(function).parameters:
            assert re.search(rf"\b{argument}\b", text), f"{name}: {argument} is not described"
        assert "Raises:" in text or "errors" in text, f"{name}: no errors described"


def test_docstrings_begin_with_a_verb_or_a_noun_phrase():
    openings = "As At By For From In Of Per That Those What When Where Which While With".split()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for file in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = isinstance(node, documented) and ast.get_docstring(node) or "-"
            name = getattr(node, "name", "the file")
            assert text.split()[0] not in openings, f"{relative(file)}: {name}: {text[:60]!r}"


def test_every_public_function_is_in_all():
    for module in (onepass.functional, onepass.nn):
        for file in sorted(Path(module.__file__).parent.glob("[!_]*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                    assert node.name in module.__all__, f"{relative(file)}: {node.name}"


def test_a_tests_path_says_what_it_is_of():
    """Equal names in different folders need packages; a test beside this file is in no family."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [file for file in tests if file.parent == ROOT / "tests"] == [Path(__file__)]
    bare = {relative(file.parent) for file in tests if not (file.parent / "__init__.py").exists()}
    assert not bare, f"no __init__.py in {sorted(bare)}"


def test_files_named_in_comments_and_pages_exist():
    """Among tests only those that comments and pages mention."""
    named = re.compile(r"\btests/[\w/]+\.(?:py|cpp|h)\b")
    for file in project_files():
        if file.suffix in (*CODE, ".md", ".toml", ".yaml") and file != Path(__file__):
            for name in named.findall(file.read_text()):
                assert (ROOT / name).exists(), f"{relative(file)}: there is no {name}"


def test_maps_of_packages_are_complete():
    """A package whose docstring lists files lists all of them."""
    for init in (ROOT / "python").rglob("__init__.py"):
        listed = set(re.findall(r"\w+\.py\b", ast.get_docstring(ast.parse(init.read_text())) or ""))
        files = {file.name for file in init.parent.glob("*.py")} - {"__init__.py"}
        assert listed in (set(), files), f"{relative(init)}: {sorted(listed ^ files)}"


def test_files_are_short():
    lengths = {
        relative(file): len(file.read_text().splitlines())
        for file in project_files()
        if file.suffix in CODE
    }
    long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: split {long} into a folder of the same name"


def test_no_paths_of_a_machine_and_no_hosts_of_registries():
    folders = "root|work|home|Users|mnt|farm|opt"
    # A package index is recognised by its name or its address, on any host.
    hosts = r"--(?:extra-)?index-url|https?://[\w.:-]+/(?:simple|packages|debian)\b"
    pattern = re.compile(rf"(?<![\w.}})/])/(?:{folders})/\w|{hosts}")
    for file in project_files():
        try:
            lines = file.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(lines, 1):
            found = None if file == Path(__file__) else pattern.search(line)
            assert not found, f"{relative(file)}:{number}: {line.strip()[:80]}"


def test_formatters_are_pinned_alike():
    files = (ROOT / ".pre-commit-config.yaml", ROOT / "pyproject.toml")
    for tool in ("ruff", "clang-format"):
        versions = [re.findall(rf"{tool}==([\d.]+)", file.read_text()) for file in files]
        assert all(versions) and len(set(sum(versions, []))) == 1, f"{tool}: {versions}"


def test_nothing_is_left_to_do():
    marker = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    for file in project_files():
        if file.suffix in CODE:
            for number, line in enumerate(file.read_text().splitlines(), 1):
                assert not marker.search(line), f"{relative(file)}:{number}: {line.strip()[:80]}"
