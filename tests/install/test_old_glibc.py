"""Links for systems older than this one (build_backend/old_glibc.py): which versions a library then
needs, and that it works here, exceptions included."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "build_backend" / "old_glibc.py"
SPEC = importlib.util.spec_from_file_location("old_glibc", SOURCE)
old_glibc = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(old_glibc)

LIBC = os.confstr("CS_GNU_LIBC_VERSION") or ""
pytestmark = [
    pytest.mark.skipif(
        shutil.which("readelf") is None or shutil.which("c++") is None,
        reason="a C++ compiler and binutils are not installed",
    ),
    pytest.mark.skipif(
        not LIBC.startswith("glibc ") or old_glibc.numbers(LIBC[6:]) < (2, 34),
        reason="this system is not newer than those that the wheels are for",
    ),
]

# Something of every kind that is newer than glibc 2.28 and g++ 8.
LIBRARY = """
#include <cmath>
#include <dlfcn.h>
#include <exception>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <thread>
#include <vector>

extern "C" void fail(unsigned index) { std::vector<int>(3).at(index) = 1; }

extern "C" double work(double x) {
  std::ostringstream text;
  text << std::exp(x) * std::log(x) << ' ' << (dlopen("no such file", RTLD_NOW) == nullptr) << ' '
       << shm_open("/", 0, 0);
  std::vector<std::shared_ptr<double>> values;
  std::exception_ptr caught;
  std::thread([&] {
    for (int i = 0; i < 3; ++i) values.push_back(std::make_shared<double>(i));
    try {
      fail(5);
    } catch (...) {
      caught = std::current_exception();
    }
  }).join();
  std::exception_ptr copy = caught;
  return std::move(text).str() == "0 1 -1" && copy && *values.at(2) == 2 ? x : -1;
}
"""
PROGRAM = """
#include <cstdio>
#include <stdexcept>
extern "C" double work(double);
extern "C" void fail(unsigned);
int main() {
  try {
    fail(7);
  } catch (const std::out_of_range& error) {
    std::printf("%g %s", work(1.0), error.what());
  }
}
"""


def compiled(text: str, *options: object) -> None:
    command = ["c++", "-std=c++20", "-O2", "-x", "c++", "-", "-x", "none", *map(str, options)]
    subprocess.run(command, check=True, input=text, text=True)


@pytest.fixture(scope="module")
def linked(tmp_path_factory) -> tuple[Path, Path]:
    """The library as linked for this system, and for older ones."""
    folder = tmp_path_factory.mktemp("old glibc")
    options = old_glibc.link_options(folder / "stubs")
    ours, older = folder / "ours.so", folder / "older.so"
    compiled(LIBRARY, "-c", "-fPIC", "-o", folder / "library.o")
    for library, extra in ((ours, []), (older, options)):
        command = ["c++", "-shared", folder / "library.o", *extra, "-ldl", "-o", library]
        subprocess.run([str(word) for word in command], check=True)
    return ours, older


def test_versions(linked):
    ours, older = linked
    too_new = " ".join(old_glibc.too_new(ours))
    newer = "exp@GLIBC_2.29 dlopen@GLIBC_2.34 shm_open@GLIBC_2.34 _M_addrefEv@CXXABI_1.3.13"
    assert all(symbol in too_new for symbol in newer.split())
    assert old_glibc.too_new(older) == []
    text = subprocess.run(["readelf", "-d", older], capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", text))
    assert {"libdl.so.2", "librt.so.1", "libstdc++.so.6", "libc.so.6"} <= needed


def test_parts_of_the_static_library_stay_hidden(linked):
    defined = [{s.name for s in old_glibc.symbols_of(path) if s.defined} for path in linked]
    assert defined[0] == defined[1]


def test_it_runs_and_its_exceptions_are_caught_outside(linked, tmp_path):
    library = linked[1]
    program = tmp_path / "program"
    compiled(PROGRAM, library, f"-Wl,-rpath,{library.parent}", "-o", program)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert said.startswith("1 vector") and "(which is 7)" in said


def test_a_symbol_that_nothing_has_is_named(tmp_path):
    library = tmp_path / "library.so"
    text = 'extern "C" void brand_new(), Py_Our(); void call() { brand_new(), Py_Our(); }'
    compiled(text, "-shared", "-fPIC", "-o", library)
    assert old_glibc.too_new(library) == ["brand_new"]


def test_an_old_system_needs_no_stubs(monkeypatch, tmp_path):
    monkeypatch.setattr(old_glibc.os, "confstr", lambda name: "glibc 2.28")
    assert old_glibc.link_options(tmp_path / "stubs") == []


def test_what_is_missing_is_said_in_a_sentence(monkeypatch, tmp_path):
    with pytest.raises(old_glibc.CannotLink, match="c\\+\\+ has no libnothing.a, which manylinux"):
        old_glibc.of_compiler("libnothing.a")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(old_glibc.CannotLink, match="there is no no-such-compiler"):
        old_glibc.link_options(tmp_path)
    monkeypatch.setattr(old_glibc.os, "confstr", lambda name: None)
    with pytest.raises(
        old_glibc.CannotLink, match="built on systems with glibc, and this has anot"
    ):
        old_glibc.link_options(tmp_path)
