"""Files that commands write: tried before the work, replaced as a whole or not at all."""

import os
import resource
from types import SimpleNamespace

import pytest

import onepass.tools.bench
import onepass.tools.compare
from onepass import cli
from onepass.tools.output_file import OutputFile

SMALL, LARGE = 1 << 16, 1 << 17


@pytest.fixture
def full_disk():
    """A function after which no file grows beyond SMALL bytes: OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    target, link = tmp_path / "figures.json", tmp_path / "link.json"
    target.write_text("the old one, which is longer")
    target.chmod(0o640)
    link.symlink_to(target.name)
    file = OutputFile(link)
    assert target.read_text() == "the old one, which is longer"  # the trial leaves it
    file.write(b"new")
    assert target.read_text() == "new" and link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", "link.json"}


def test_a_new_file_has_the_usual_mode(tmp_path):
    OutputFile(tmp_path / "ours").write(b"x")
    (tmp_path / "usual").write_bytes(b"x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_write_that_fails_leaves_the_old_file(tmp_path, full_disk):
    target = tmp_path / "figures.json"
    target.write_text("good")
    file = OutputFile(target)
    full_disk()
    with pytest.raises(OSError):
        file.write(bytes(LARGE))
    assert target.read_text() == "good" and list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_found_by_the_trial(tmp_path, full_disk):
    full_disk()
    with pytest.raises(OSError):
        OutputFile(tmp_path / "figures.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/dev/full", "no/such/folder/x", "."])
def test_what_cannot_be_written_is_found_by_the_trial(path):
    with pytest.raises(OSError):
        OutputFile(path)


def test_pipes_are_written_as_they_are(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file = OutputFile(pipe)  # does not wait for a reader
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file.write(b"figures")
    assert os.read(reader, 100) == b"figures" and pipe.is_fifo()
    os.close(reader)


def commands(monkeypatch, begin):
    """Commands whose work is `begin()` and results of LARGE bytes."""
    text = "x" * LARGE

    def compared(settings):
        begin()
        return SimpleNamespace(to_dict=lambda: {"text": text}, show=lambda _: print("table"))

    def measured(cases, args, goals, file):
        begin()
        return {"failed": {}, "text": text}, [], {}, False

    monkeypatch.setattr(onepass.tools.compare, "run", compared)
    monkeypatch.setattr(onepass.tools.compare, "_plot", lambda *_: text.encode())
    monkeypatch.setattr(onepass.tools.bench, "_run", measured)
    monkeypatch.setattr("onepass.tools.bench.report.print_tables", lambda *_: print("table"))
    for name in ("print_doubts", "print_footer"):
        monkeypatch.setattr(f"onepass.tools.bench.report.{name}", lambda *_: None)


WORDS = {
    "compare --json": ["compare", "--quick", "--json", "figures"],
    "compare --plot": ["compare", "--quick", "--plot", "figures.png"],
    "bench --json": ["bench", "dropout", "--quick", "--json", "figures"],
}


@pytest.mark.parametrize("name", WORDS)
def test_a_disk_that_fills_up_is_no_success(name, monkeypatch, tmp_path, capsys, full_disk):
    monkeypatch.chdir(tmp_path)
    commands(monkeypatch, begin=full_disk)
    command, *_, flag, path = WORDS[name]
    (tmp_path / path).write_text("good")
    assert cli.main(WORDS[name]) == 1
    output, errors = capsys.readouterr()
    assert "table" in output  # the measurement is not lost
    assert errors.startswith(f"{command}: {flag} could not be written: ") and path in errors
    assert (tmp_path / path).read_text() == "good" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_be_written_is_found_before_the_work(name, monkeypatch, capsys):
    commands(monkeypatch, begin=lambda: pytest.fail("it was measured first"))
    assert cli.main([*WORDS[name][:-1], "/dev/full"]) == 2
    assert "must name a file to write: No space left on device: /dev/full" in capsys.readouterr()[1]
