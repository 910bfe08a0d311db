"""The archive that build_backend/repack.py writes is the one that it read, packed otherwise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "build_backend" / "repack.py"
SPEC = importlib.util.spec_from_file_location("repack", SOURCE)
repack = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(repack)

FILES = {
    "package/__init__.py": b"x = 1\n" * 1000,
    "package/noise.bin": os.urandom(3000),  # does not get smaller: stored
    "package/empty": b"",
    "package/Gr\u00f6\u00dfe.txt": b"a name beyond ASCII" * 9,
}


def best(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("deflate", ["zlib", "zopfli"])
def test_the_same_files_in_less_room(tmp_path, deflate):
    if deflate == "zopfli":
        pytest.importorskip("zopfli")
    wheel = tmp_path / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for mode, (name, data) in enumerate(FILES.items()):
            info = zipfile.ZipInfo(name, (2026, 11, 26, 5, 42, 10 + 2 * mode))
            info.external_attr = (0o100640 + mode) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    before, size = zipfile.ZipFile(wheel).infolist(), wheel.stat().st_size
    repack.repack(wheel, best if deflate == "zlib" else repack.zopfli)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == FILES
        kept = [(i.filename, i.date_time, i.external_attr, i.file_size, i.CRC) for i in before]
        after = archive.infolist()
        assert kept == [
            (i.filename, i.date_time, i.external_attr, i.file_size, i.CRC) for i in after
        ]
        assert [i.compress_type for i in after] == [8, 0, 0, 8]
    assert wheel.stat().st_size < size and list(tmp_path.iterdir()) == [wheel]


def test_another_reader_takes_it(tmp_path):
    """Python imports from the archive: zipimport reads the format by itself."""
    wheel = tmp_path / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", FILES["package/__init__.py"])
    repack.repack(wheel, best)
    code = "import package; print(package.x, package.__file__)"
    environment = {**os.environ, "PYTHONPATH": os.fspath(wheel)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert said.stdout.decode().startswith(f"1 {wheel}"), said.stderr
