"""The results of `make gpu-report` in one archive, to be carried away from a machine: at most eight
files of 16 MiB.

`gpu-report.tar.gz`, or, if that is larger, `gpu-report.tar.gz.0` and so on, which
`cat gpu-report.tar.gz.* | tar xz` unpacks. If even eight parts are too small, the largest files
are left out, and their names are in `left-out.txt`.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

NAME = "gpu-report.tar.gz"
PART = 16 << 20  # bytes
PARTS = 8


def pack(folder: Path, out: Path, part: int = PART, parts: int = PARTS) -> list[Path]:
    """Packs a folder, by its own name, into `out`, in place of an earlier archive.

    Returns the archive's files. Raises OSError if they cannot be written; an earlier archive then
    stays as it is.
    """
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=_size)
    left_out: list[Path] = []
    while len(data := _packed(folder, files, left_out)) > part * parts and files:
        left_out.append(files.pop())
    pieces = [data[i : i + part] for i in range(0, len(data), part)]
    names = [NAME] if len(pieces) == 1 else [f"{NAME}.{i}" for i in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        (out / f"{name}.new").write_bytes(piece)
    for stale in (out / NAME, *out.glob(f"{NAME}.[0-9]")):
        stale.unlink(missing_ok=True)
    return [(out / f"{name}.new").rename(out / name) for name in names]


def _size(file: Path) -> int:
    return file.stat().st_size


def _packed(folder: Path, files: Sequence[Path], left_out: Sequence[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in files:
            archive.add(file, file.relative_to(folder.parent))
        if left_out:
            text = "".join(f"{file.relative_to(folder.parent)}\n" for file in left_out).encode()
            about = tarfile.TarInfo(f"{folder.name}/left-out.txt")
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text))
    return buffer.getvalue()
