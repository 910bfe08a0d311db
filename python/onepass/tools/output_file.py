"""Files that a command writes at its end, tried at its beginning. Standard library only: it is also
used before onepass is built (benchmarks/gpu_report.py)."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

# Bytes written for a trial where a file is to be: about as much as a picture takes.
_TRIAL_BYTES = 1 << 20


class OutputFile:
    """A file that is replaced as a whole: the old one stays until all of the new one is written.

    A target that is no regular file (a device, a pipe, /dev/stdout) is written directly.

    Args:
        path: links in it are followed.
        trial: False leaves errors to the first write.

    Raises:
        OSError: nothing can be written there, or the disk is full.
    """

    def __init__(self, path: str | os.PathLike, trial: bool = True):
        self.path = Path(os.path.realpath(path))
        if not trial:
            return
        if self._is_regular():
            if self.path.exists() and not os.access(self.path, os.W_OK):
                raise PermissionError(13, os.strerror(13), str(self.path))
            self._with_part(bytes(_TRIAL_BYTES), keep=False)
        elif self.path.is_dir():
            raise IsADirectoryError(21, os.strerror(21), str(self.path))
        elif stat.S_ISCHR(self.path.stat().st_mode):  # a pipe would wait for its reader
            self._overwrite(b"\n")

    def write(self, data: bytes) -> None:
        """Replaces the file's content by data.

        Raises:
            OSError: it could not be written, and the file has its old content.
        """
        if self._is_regular():
            self._with_part(data, keep=True)
        else:
            self._overwrite(data)

    def _is_regular(self) -> bool:
        return self.path.is_file() or not self.path.exists()

    def _overwrite(self, data: bytes) -> None:
        with open(self.path, "wb") as file:
            file.write(data)

    def _with_part(self, data: bytes, keep: bool) -> None:
        """Writes a file beside the target, and renames it to the target if it is kept."""
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # a disk may say only now that it is full
            if keep:
                if self.path.exists():
                    part.chmod(stat.S_IMODE(self.path.stat().st_mode))
                os.replace(part, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()


def write_or_say(command: str, flag: str, file: OutputFile | None, data: bytes) -> bool:
    """Writes a file, if there is one; False, and a line on stderr, if that failed."""
    try:
        if file is not None:
            file.write(data)
    except OSError as error:
        print(
            f"{command}: {flag} could not be written: {error.strerror}: {file.path}",
            file=sys.stderr,
        )
        return False
    return True
