"""`make sizes`: the lines of each part of the project, beside the most that it is to have."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = {".py", ".cpp", ".h", ".cu", ".cuh"}


class Part(NamedTuple):
    """A folder, without some below it.

    Attributes:
        most: lines that it is to have at most; 0: no goal.
    """

    folder: str
    most: int = 0
    without: tuple[str, ...] = ()

    def files(self) -> Iterator[Path]:
        for file in (ROOT / self.folder).rglob("*"):
            inside = file.relative_to(ROOT).as_posix()
            if file.suffix in SOURCES and not inside.startswith(self.without):
                yield file


PARTS = (
    Part("csrc"),
    Part("csrc/ops", 7_300),
    Part("python/onepass"),
    Part("python/onepass/_ops", 3_000, ("python/onepass/_ops/_dtensor/",)),
    Part("tests", 67_000),
    Part("benchmarks"),
    Part("examples"),
)


def lines(part: Part) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in part.files())


def table() -> str:
    rows = [f"{'part':24}{'files':>7}{'lines':>9}{'goal':>9}"]
    for part in PARTS:
        count = sum(1 for _ in part.files())
        goal = f"{part.most:,}" if part.most else ""
        rows.append(f"{part.folder:24}{count:7}{lines(part):9,}{goal:>9}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
