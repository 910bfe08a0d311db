"""The archive that `make gpu-report` leaves."""

import io
import random
import tarfile
from pathlib import Path

import pytest

from tests.bench import machines  # noqa: F401  (which finds the next)

import gpu_archive  # isort: skip


@pytest.fixture
def results(tmp_path) -> Path:
    folder = tmp_path / "nvidia-h100"
    folder.mkdir()
    drawn = random.Random(0)
    for name, size in (("report.json", 300), ("table.md", 500), ("report.log", 9000)):
        (folder / name).write_bytes(drawn.randbytes(size))  # which gzip makes no smaller
    return folder


def unpacked(files: list[Path]) -> dict[str, bytes]:
    data = b"".join(file.read_bytes() for file in files)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {name: archive.extractfile(name).read() for name in archive.getnames()}


def test_one_file_holds_all_results(results, tmp_path):
    files = gpu_archive.pack(results, tmp_path)
    assert files == [tmp_path / "gpu-report.tar.gz"]
    assert unpacked(files) == {
        f"nvidia-h100/{file.name}": file.read_bytes() for file in results.iterdir()
    }


def test_parts_of_a_large_one_and_what_takes_their_place(results, tmp_path):
    files = gpu_archive.pack(results, tmp_path, part=2000)
    assert [file.name for file in files] == [f"gpu-report.tar.gz.{i}" for i in range(len(files))]
    assert 5 <= len(files) <= 8 and all(file.stat().st_size <= 2000 for file in files)
    assert unpacked(files)["nvidia-h100/report.log"] == (results / "report.log").read_bytes()
    assert gpu_archive.pack(results, tmp_path) == [tmp_path / "gpu-report.tar.gz"]
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["gpu-report.tar.gz"]


def test_the_largest_are_left_out_if_parts_do_not_suffice(results, tmp_path):
    files = gpu_archive.pack(results, tmp_path, part=500, parts=6)
    assert len(files) <= 6
    names = ("report.json", "table.md", "left-out.txt")
    assert unpacked(files).keys() == {f"nvidia-h100/{name}" for name in names}
    assert unpacked(files)["nvidia-h100/left-out.txt"] == b"nvidia-h100/report.log\n"


def test_an_earlier_archive_survives_a_full_disk(results, tmp_path, monkeypatch):
    (before,) = gpu_archive.pack(results, tmp_path)
    data = before.read_bytes()

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        gpu_archive.pack(results, tmp_path)
    assert before.read_bytes() == data
