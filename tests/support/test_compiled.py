"""Compiled files are kept until a source changes, and several processes share the work."""

import fcntl
import shutil
import threading

import pytest

from tests.support import compiled

# Writes its source into its output, and the number of its calls into a file beside.
COMPILER = """
echo called >> "$1.calls"
cat "$1" > "$3"
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    if shutil.which("sh") is None:
        pytest.skip("there is no sh")
    monkeypatch.setattr(compiled, "BUILD", tmp_path / "build")
    script = tmp_path / "compiler"
    script.write_text(COMPILER)

    def make(name: str, text: str) -> compiled.Recipe:
        compiled._included.cache_clear()  # sources do not change while a process of tests runs
        source = tmp_path / f"{name}.cpp"
        source.write_text(text)
        return compiled.Recipe(name, ("sh", script, source), (source,), ".o")

    yield make
    compiled._included.cache_clear()


def calls(recipe: compiled.Recipe) -> int:
    return recipe.command[-1].with_name(f"{recipe.name}.cpp.calls").read_text().count("called")


def test_a_file_is_made_once(recipe):
    one = recipe("one", "text")
    (file,) = compiled.made([one])
    assert compiled.made([one, one]) == [file, file] and file.read_text() == "text"
    assert calls(one) == 1


def test_what_changed_takes_the_place_of_what_was(recipe, tmp_path):
    text = '#include <memory>\n#include "part.h"'
    (tmp_path / "memory").mkdir()  # no header
    (tmp_path / "part.h").write_text("a")
    (first,) = compiled.made([recipe("one", text)])
    (tmp_path / "part.h").write_text("b")
    (second,) = compiled.made([recipe("one", text)])
    assert first != second and not first.exists() and second.exists()
    other = compiled.made([recipe("one-more", "")])
    assert second.exists() and other[0].exists()


def test_what_another_process_makes_is_left_to_it(recipe):
    """The second file is made while the first is locked, and the first is not made again."""
    both = [recipe("first", "1"), recipe("second", "2")]
    compiled.BUILD.mkdir()
    with open(compiled.BUILD / "first.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=compiled.made, args=(both,))
        thread.start()
        for _ in range(1000):
            if both[1].file().exists():
                break
            thread.join(0.01)
        assert both[1].file().read_text() == "2" and not both[0].file().exists()
        both[0].file().write_text("by the other")
    thread.join()
    assert both[0].file().read_text() == "by the other"


def test_a_source_that_does_not_compile_is_told(recipe):
    wrong = recipe("one", "text")
    wrong.command[-1].unlink()
    compiled.BUILD.mkdir()
    with pytest.raises(pytest.fail.Exception, match=r"one\.cpp"):
        compiled._make(wrong, compiled.BUILD / "one.o", wait=True)


def test_what_was_found_out_is_kept_until_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "BUILD", tmp_path / "build")
    files, answers = [tmp_path / "one", tmp_path / "two"], iter("abc")
    for file in files:
        file.write_text("text")

    def fails() -> str:
        raise KeyError("here")

    with pytest.raises(KeyError):
        compiled.found("facts", files, fails)
    assert [compiled.found("facts", files, lambda: next(answers)) for _ in range(2)] == ["a", "a"]
    files[1].write_text("other")
    assert compiled.found("facts", files, lambda: next(answers)) == "b"
    assert len(list(compiled.BUILD.iterdir())) == 1
