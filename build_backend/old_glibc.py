"""Links for older systems than this one: for glibc 2.28 and the libstdc++ of g++ 8.

A link against this machine's libraries takes the newest version of each symbol, which an older
system lacks. But glibc and libstdc++ keep the older versions too. So `link_options` writes stub
libraries without code: each defines a symbol in the newest version that the older system has, and
from there the linker takes the version. What the older system lacks altogether:

- newer parts of libstdc++ come from libstdc++.a and stay hidden (compilers in manylinux images do
  the same);
- `__libc_single_threaded` (glibc 2.32) tells libstdc++'s headers that they may do without atomic
  additions. Ours says no, which is always right.

`too_new` finds what is still missing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

# What auditwheel's policy of this name allows.
PLATFORM = "manylinux_2_28"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}

# Libraries that became part of libc in 2.34. Their functions have had a new version since then.
MOVED = {
    "libpthread.so.0": r"_?_?(pthread|sem)_",
    "libdl.so.2": r"dl",
    "librt.so.1": r"(shm|mq|timer|aio|lio)_",
}
MOVED_IN = (2, 34)
# The symbols without a version that the process gives to a library of ours.
OF_THE_PROCESS = re.compile("aoti_torch_|torch_|_?Py")


class CannotLink(Exception):
    """One sentence: what this machine lacks."""


class Symbol(NamedTuple):
    name: str
    node: str  # of the version: GLIBC, GLIBCXX, CXXABI; empty: no version
    number: tuple[int, ...]
    current: bool  # the version that this machine's linker takes
    defined: bool
    weak: bool
    kind: str  # FUNC, OBJECT, ...

    @property
    def version(self) -> str:
        return f"{self.node}_{'.'.join(map(str, self.number))}"

    @property
    def is_new(self) -> bool:
        return self.number > NEWEST.get(self.node, self.number)


def link_options(folder: Path) -> list[str]:
    """Writes the stubs into `folder`; returns the linker's options, none on an old system."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "another libc").partition(" ")
    if name != "glibc":
        raise CannotLink(f"{PLATFORM} wheels are built on systems with glibc, and this has {name}")
    if numbers(version) <= NEWEST["GLIBC"]:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    libc = of_compiler("libc.so.6")
    (loader,) = re.findall(r"NEEDED.*\[(ld-linux.*)\]", output(["readelf", "-W", "-d", libc]))
    flag = folder / "single_threaded.o"
    text = '__attribute__((visibility("hidden"))) char __libc_single_threaded;'
    run([*compiler(), "-x", "c", "-", "-c", "-fPIC", "-o", flag], input=text)

    libraries = {name: {} for name in ("libc.so.6", *MOVED)}
    for symbol, newest in older_symbols(libc):
        libraries[home(symbol, newest)][symbol.name] = symbol
    for name in ("libm.so.6", "libstdc++.so.6", loader):
        libraries[name] = {symbol.name: symbol for symbol, _ in older_symbols(of_compiler(name))}
    for name, symbols in libraries.items():
        write_stub(folder / name, symbols.values())

    # What -lc, -lm and so on find: first in this folder.
    if_needed = quoted([folder / name for name in (*MOVED, loader)])
    libc = quoted([folder / "libc.so.6", of_compiler("libc_nonshared.a"), flag])
    groups = {
        "libc.so": f"{libc} AS_NEEDED({if_needed})",
        "libm.so": quoted([folder / "libm.so.6"]),
        "libstdc++.so": quoted([folder / "libstdc++.so.6", of_compiler("libstdc++.a")]),
        **{name.rpartition(".")[0]: quoted([folder / name]) for name in MOVED},
    }
    for name, files in groups.items():
        (folder / name).write_text(f"GROUP({files})\n")
    return [f"-L{folder}", "-Wl,--exclude-libs,libstdc++.a"]


def too_new(library: Path) -> list[str]:
    """The symbols that `library` takes from nowhere on a system of `PLATFORM`."""
    return [
        f"{symbol.name}@{symbol.version}" if symbol.node else symbol.name
        for symbol in symbols_of(library)
        if not symbol.defined and not symbol.weak
        if symbol.is_new or not (symbol.node or OF_THE_PROCESS.match(symbol.name))
    ]


def older_symbols(library: Path):
    """Of each symbol that can be linked to: the newest version that is old enough, and today's."""
    known: dict[str, list[Symbol]] = {}
    for symbol in symbols_of(library):
        if symbol.defined and symbol.node in (*NEWEST, "GCC"):
            known.setdefault(symbol.name, []).append(symbol)
    for versions in known.values():
        old = [symbol for symbol in versions if not symbol.is_new]
        current = [symbol for symbol in versions if symbol.current]
        if old and current:
            yield max(old, key=lambda symbol: symbol.number), current[0]


def home(symbol: Symbol, newest: Symbol) -> str:
    """The library that has a symbol of today's libc on an old system."""
    if newest.number >= MOVED_IN:
        for name, pattern in MOVED.items():
            if re.match(pattern, symbol.name):
                return name
    return "libc.so.6"


def write_stub(library: Path, symbols) -> None:
    """A shared library of this name that defines these symbols and has no code."""
    nodes: dict[str, list[str]] = {}
    lines = [".text"]
    for symbol in symbols:
        kind = "function" if symbol.kind in ("FUNC", "IFUNC") else "object"
        lines += [f".globl {symbol.name}", f".type {symbol.name}, %{kind}", f"{symbol.name}:"]
        nodes.setdefault(symbol.version, []).append(symbol.name)
    script = library.with_suffix(".map")
    script.write_text(
        "".join(f"{node} {{ {'; '.join(names)}; }};\n" for node, names in nodes.items())
    )
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{library.name}"]
    options += [f"-Wl,--version-script={script}", "-o", library]
    run([*compiler(), "-x", "assembler", "-", *options], input="\n".join(lines) + "\n")


def quoted(files: list[Path]) -> str:
    return " ".join(f'"{file}"' for file in files)


def symbols_of(library: Path):
    """The dynamic symbols of a library, without glibc's private ones."""
    line = re.compile(
        r"\s*\d+: \S+ +\S+ (?P<kind>\S+) +(?P<bind>\S+) +\S+ +(?P<section>\S+) (?P<name>[^@\s]+)"
        r"(?P<at>@@?)?(?P<node>[A-Z]+)?(_(?P<number>[\d.]+)(?=\s|$))?"
    )
    for text in output(["readelf", "-W", "--dyn-syms", library]).splitlines():
        found = line.match(text)
        if found and bool(found["at"]) == bool(found["number"]):
            yield Symbol(
                name=found["name"],
                node=found["node"] or "",
                number=numbers(found["number"]),
                current=found["at"] == "@@",
                defined=found["section"] not in ("UND", "ABS"),
                weak=found["bind"] == "WEAK",
                kind=found["kind"],
            )


def of_compiler(name: str) -> Path:
    """The file of this name that the compiler would link."""
    path = Path(output([*compiler(), f"-print-file-name={name}"]).strip())
    if not path.is_absolute():
        raise CannotLink(f"{compiler()[0]} has no {name}, which {PLATFORM} wheels are linked with")
    return path.resolve()


def numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (version or "").split(".") if part)


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def output(command: list) -> str:
    return run(command).stdout


def run(command: list, **options) -> subprocess.CompletedProcess:
    words = [os.fspath(word) for word in command]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=environment, **options)
    except FileNotFoundError:
        raise CannotLink(f"there is no {words[0]}, which {PLATFORM} wheels need") from None
    if done.returncode:
        raise CannotLink(f"{shlex.join(words)} failed: {done.stderr.strip()}")
    return done
