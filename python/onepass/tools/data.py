"""The text: bytes of real files, with a fixed split into a training and a held-out part."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onepass.tools.errors import BadInput

HELD_OUT = 10  # the last tenth of every file is never trained on


@dataclass(frozen=True)
class Text:
    """Bytes as uint8 tensors, (train_bytes,) and (held_out_bytes,), and where they came from."""

    train: Tensor
    held_out: Tensor
    source: str
    files: int

    def describe(self) -> str:
        size = (self.train.numel() + self.held_out.numel()) / 1e6
        return f"{self.source}: {self.files} files, {size:.1f} MB, the last tenth of each held out"

    def check(self, block: int) -> None:
        """Raises BadInput unless both parts hold a block and the byte after it."""
        shortest = min(self.train.numel(), self.held_out.numel())
        if shortest <= block:
            raise BadInput(
                f"text must be longer: its held-out tenth must hold {block + 1} bytes for "
                f"--block {block}, got {shortest} of {self.train.numel() + self.held_out.numel()}"
            )


def standard_library() -> list[Path]:
    """The Python sources of the running interpreter's standard library, sorted by name.

    Its own test suite, installed packages and caches are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in paths if not skipped.intersection(path.parts))
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def load_text(files: Sequence[str] | None = None) -> Text:
    """Reads files, or the standard library's sources when None is given."""
    if files:
        return _split((Path(name) for name in files), source=" ".join(files))
    version = sysconfig.get_python_version()
    return _split(standard_library(), source=f"standard library of Python {version}")


def _split(paths: Iterable[Path], source: str) -> Text:
    train, held_out = [], []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadInput(f"--text must name readable files: {path}: {error.strerror}") from error
        cut = len(content) - len(content) // HELD_OUT
        train.append(content[:cut])
        held_out.append(content[cut:])
    return Text(_tensor(train), _tensor(held_out), source, len(train))


def _tensor(parts: list[bytes]) -> Tensor:
    joined = bytearray(b"".join(parts))
    return (
        torch.frombuffer(joined, dtype=torch.uint8)
        if joined
        else torch.empty(0, device="cpu").byte()
    )


class Batches:
    """Training batches by step number, from a separate generator.

    Draws of a model from torch's generator (initial weights, dropout) do not change batches, so
    every variant gets the same ones.
    """

    def __init__(self, text: Text, block: int, batch: int, seed: int):
        self.text, self.block, self.batch, self.seed = text, block, batch, seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of a step, int64 (batch, block): the targets are the next bytes."""
        # torch's CPU generator uses the low 32 bits of a seed: an odd factor spreads seeds over
        # them.
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B1 + step) % 2**32)
        last = self.text.train.numel() - self.block
        starts = torch.randint(last, (self.batch,), generator=generator, device="cpu")
        return _windows(self.text.train, starts, self.block)


def held_out_batch(text: Text, block: int, rows: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64 (rows, block): windows spread evenly over the held-out text."""
    last = text.held_out.numel() - block - 1
    starts = torch.linspace(0, last, rows, dtype=torch.float64, device="cpu").long()
    return _windows(text.held_out, starts, block)


def _windows(data: Tensor, starts: Tensor, block: int) -> tuple[Tensor, Tensor]:
    rows = data[starts[:, None] + torch.arange(block + 1, device="cpu")].long()  # (rows, block + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
