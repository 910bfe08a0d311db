"""Compiles CUDA sources as the build does, and reads the result by cuobjdump.

cuobjdump and nvdisasm, which it calls, come with the tests (nvidia-cuda-*): nvcc alone lacks them.
"""

import heapq
import math
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import compiled

ROOT = Path(__file__).resolve().parents[2]


def cubin(source: Path, *archs: str) -> Path:
    """Compiled from `source` for architectures (as in sm_80); skips where there is no nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    options = (ROOT / "cmake" / "cuda.cmake").read_text()
    (flags,) = re.findall(r"COMPILE_LANGUAGE:CUDA>:(--[^>]*)>", options)
    command = [nvcc, "-std=c++20", *flags.split(), "-Werror=all-warnings"]
    command += [f"-I{ROOT / 'csrc'}", source]
    if len(archs) == 1:
        command += ["-cubin", f"-arch={archs[0]}"]
    else:
        command += ["-fatbin"]
        command += [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in archs]
    name = "_".join(source.relative_to(ROOT).with_suffix("").parts)
    recipe = compiled.Recipe("-".join((name, *archs)), tuple(command), (source,), ".cubin")
    return compiled.made([recipe])[0]


def cuobjdump(*words: str | Path) -> str:
    """The output of cuobjdump; skips if it is missing."""
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [str(file.locate()) for file in files if file.name == "cuobjdump"]
    program = shutil.which("cuobjdump") or next(iter(found), None)
    if program is None:
        pytest.skip("there is no cuobjdump")
    return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout


# A kernel is (architecture, name): a library holds code of it for each of its architectures.
Kernel = tuple[str, str]


def by_architecture(text: str) -> list[tuple[str, str]]:
    """cuobjdump's output for each; for a file of one architecture it does not name it."""
    first, *rest = re.split(r"^arch = (\S+)\n", text, flags=re.MULTILINE)
    return [("", first), *zip(rest[::2], rest[1::2], strict=True)]


def resources(binary: Path) -> dict[Kernel, dict[str, int]]:
    """By kernel: REG, STACK, SHARED, LOCAL and so on."""
    return {
        (arch, name): {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
        for arch, text in by_architecture(cuobjdump("--dump-resource-usage", binary))
        for name, line in re.findall(r"Function (\S+):\n(.*)", text)
    }


def max_threads(binary: Path) -> dict[Kernel, int]:
    """By kernel: the most threads of a block, from its launch bounds."""
    bound = re.compile(r"EIATTR_MAX_THREADS\s+Format:.*\s+Value:\s*0x(\w+)")
    return {
        (arch, section.partition("\n")[0]): int(threads[1], 16)
        for arch, text in by_architecture(cuobjdump("-elf", binary))
        for section in text.split("\n.nv.info.")[1:]
        if (threads := bound.search(section))
    }


def machine_code(binary: Path) -> dict[Kernel, str]:
    """By kernel, as text."""
    return {
        (arch, part.partition("\n")[0]): part
        for arch, text in by_architecture(cuobjdump("-sass", binary))
        for part in text.split("Function : ")[1:]
    }


def instructions(code: str) -> list[tuple[int, str]]:
    """(address, text) of a kernel's machine code."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    return [(int(address, 16), text) for address, text in found]


def loops(code: str) -> list[str]:
    """Loops of machine code: instructions from the target of a backward branch to the branch."""
    code = instructions(code)
    back = [
        (int(target[1], 16), address)
        for address, text in code
        if (target := re.search(r"BRA.*?(0x[0-9a-f]+)", text)) and int(target[1], 16) < address
    ]
    return [
        "\n".join(text for address, text in code if first <= address <= last)
        for first, last in back
    ]


_JUMP = re.compile(r"\b(BRA|BRX|JMP|CALL|RET|EXIT)\b")
_ALWAYS = re.compile(r"(BRA 0x|BRX|JMP|RET|EXIT)")  # without a condition
_NOWHERE = re.compile(r"(CALL|BRX)\b")  # slow paths, and jumps by a table; without a condition


def _blocks(code: str) -> list[tuple[list[str], list[int]]]:
    """Machine code cut at jumps: (instructions, numbers of the blocks that may come next)."""
    lines = instructions(code)
    at = {address: i for i, (address, _) in enumerate(lines)}
    targets, starts = {}, {0}
    for i, (_, text) in enumerate(lines):
        if not _JUMP.search(text):
            continue
        starts.add(i + 1)
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target and (goal := at.get(int(target[1], 16))) is not None:
            targets[i] = goal
            starts.add(goal)
    firsts = sorted(start for start in starts if start < len(lines))
    number = {first: i for i, first in enumerate(firsts)}
    blocks = []
    for first, end in zip(firsts, [*firsts[1:], len(lines)], strict=True):
        texts = [text for _, text in lines[first:end]]
        following = [number[targets[end - 1]]] if end - 1 in targets else []
        if end in number and not _ALWAYS.match(texts[-1]):
            following.append(number[end])
        blocks.append((texts, following))
    return blocks


def fewest(code: str, needs: dict[str, int], whole: bool = False) -> int:
    """The length of the shortest way that has `needs`, a number of instructions by pattern: once
    through a loop, or through the whole kernel.

    A bound from below: which conditions exclude each other is not known here.
    """
    blocks = _blocks(code)
    patterns, wanted = [re.compile(pattern) for pattern in needs], tuple(needs.values())
    has = [tuple(sum(bool(p.search(t)) for t in texts) for p in patterns) for texts, _ in blocks]
    closed = [bool(_NOWHERE.match(texts[-1])) for texts, _ in blocks]

    def shortest(first: int, last: int | None) -> float:
        start = (first, (0,) * len(wanted))
        lengths, left = {start: 0}, [(0, start)]
        while left:
            length, place = heapq.heappop(left)
            number, got = place
            if length > lengths[place] or closed[number]:
                continue
            texts, following = blocks[number]
            length += len(texts)
            got = tuple(min(w, g + h) for w, g, h in zip(wanted, got, has[number], strict=True))
            is_end = "EXIT" in texts[-1] if last is None else number == last
            if is_end and got == wanted:
                return length
            if number == last:
                continue
            for after in following:
                if last is not None and after <= first:
                    continue
                if length < lengths.get((after, got), math.inf):
                    lengths[after, got] = length
                    heapq.heappush(left, (length, (after, got)))
        return math.inf

    if whole:
        return shortest(0, None)
    back = [(to, at) for at, (_, following) in enumerate(blocks) for to in following if to <= at]
    return min((shortest(to, at) for to, at in back), default=math.inf)


_ACCESS = re.compile(
    r"(@!?U?P\d+ )?(LDG|STG)\.E(\S*) .*?\[(R\d+|RZ)(?:\.64)?(?:\+UR\d+)?(?:\+(-?0x[0-9a-f]+))?\]"
)
_BYTES = {"64": 8, "128": 16, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_LEAVES = re.compile(r"\b(BRA|BRX|BSYNC|BSSY|BAR|CALL|EXIT|JMP|RET|WARPSYNC)\b")


def split_accesses(code: str) -> list[str]:
    """Accesses of 16 neighbouring bytes by four or more instructions, as "STG 4 4 4 4".

    They are those of one stretch of code without a branch, by one register and predicate.
    """
    found: list[str] = []
    together: dict[tuple[str, ...], dict[int, int]] = {}

    def end(keys) -> None:
        for key in keys:
            sizes, offset = together.pop(key), None
            run: list[int] = []
            for start in (*sorted(sizes), None):
                if run and start != offset:
                    if len(run) >= 4 and sum(run) >= 16:
                        found.append(" ".join((key[0], *map(str, run))))
                    run = []
                if start is not None:
                    run.append(sizes[start])
                    offset = start + sizes[start]

    for _, text in instructions(code):
        access = _ACCESS.match(text)
        if access:
            predicate, kind, flags, register, offset = access.groups(default="")
            size = next((_BYTES[flag] for flag in flags.split(".") if flag in _BYTES), 4)
            if size < 16:
                together.setdefault((kind, predicate, register), {})[int(offset or "0", 16)] = size
        if _LEAVES.search(text):
            end(list(together))
        written = re.match(r"(?:@!?U?P\d+ )?(?!STG)[A-Z]\S* (?:U?P[T\d]+, )*R(\d+)\b", text)
        if written:  # an address takes two registers
            stale = {f"R{written[1]}", f"R{int(written[1]) - 1}"}
            end([key for key in together if key[2] in stale])
    end(list(together))
    return found


def products_on_the_way(code: str) -> list[int]:
    """The number of products between the load of each matrix and the movmatrix that turns it."""
    texts = [text for _, text in instructions(code)]
    found = []
    for i, text in enumerate(texts):
        if source := re.search(r"MOVM\S* R\d+, (R\d+)", text):
            load = re.compile(rf"LDG\S* {source[1]},")
            first = max(j for j in range(i) if load.search(texts[j]))
            found.append(sum("HMMA" in between for between in texts[first:i]))
    return found
