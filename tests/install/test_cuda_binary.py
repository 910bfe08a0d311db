"""The compiled CUDA kernels: no registers are spilled, and loops of products use tensor cores."""

import re
from pathlib import Path

import pytest

from onepass import _C, _library
from tests.install import nvcc
from tests.support import compiled

CUDA = nvcc.ROOT / "csrc" / "cuda"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
REGISTERS = 65536  # of a multiprocessor, on all of them
TEXTS = {file: file.read_text() for file in sorted(CUDA.rglob("*.cu*"))}
KERNELS = {name for text in TEXTS.values() for name in re.findall(r"\b(\w+_kernel)\(", text)}
KERNELS |= {"ModulatedNormForward", "ModulatedNormBackward"}  # arguments of norms' kernels
SOURCES = [str(file.relative_to(CUDA)) for file in TEXTS if file.suffix == ".cu"]
SOURCES = [name for name in SOURCES if not name.startswith("attention")]
# Minutes of compiling for each architecture: the oldest, and the one whose speed is promised.
ATTENTION = tuple(f"attention/{file.name}" for file in sorted(CUDA.glob("attention/*.cu")))
ATTENTION_ARCHITECTURES = ("sm_80", "sm_90")
COMPILED = [(source, arch) for source in SOURCES for arch in ARCHITECTURES]
COMPILED += [(source, arch) for source in ATTENTION for arch in ATTENTION_ARCHITECTURES]
# They have no register to spare. `make test` compiles the quick ones for one architecture.
QUICK = ("attention/backward.cu", "attention/plain_forward.cu")
FULL = (*QUICK, "attention/forward.cu", "attention/backward_ends.cu")
COMPILED += [(source, arch) for source in FULL for arch in ("sm_100", "sm_120")]
# Those of the built library are looked at there.
BUILT = re.findall(r"\d+(?!\d|-virtual)", _C.build_info()["cuda_archs"])
COMPILED = [(source, arch) for source, arch in COMPILED if arch.removeprefix("sm_") not in BUILT]
WITHOUT_KERNELS = ("attention/backend.cu", "facts.cu", "kernels.cu")
OF_TILES = r"attention_(forward|backward)_kernel"  # whose rows cp.async brings in any pieces it has
PIECES = (r"LDGSTS\.E\.BYPASS\.128 ", r"LDGSTS\.E\.64 ", r"LDGSTS\.E ")
OF_WHOLE_ROWS = r"attention_forward_kernel\S*Li(\d+)ELNS\S*ForwardKindE[01]E"  # 16 bytes alone
TWICE = r"attention_(forward|dbias)_kernel"  # two blocks share a multiprocessor
PLACED = r"attention_(forward|backward|dbias)_kernel"  # shared_base() of cuda/ptx.cuh
# Kernels that ask for the next row while they are at one.
AHEAD = r"\dnorm_backward_kernel(?!\S*4SameIdE)"
# Kernels that ask for pairs of a bias in front of the product that these are added to, by bucket.
WITH_BIAS = r"attention_(backward_kernel\S*Li(\d+)ELb1E|dbias_kernel\S*Li(\d+)E)"
# Instructions of the main loop, of any way through it. A warp issues about half of them an
# iteration, 320 of which are products (160 at 256 columns): the tensor cores wait for the others.
WITHOUT_TERMS = r"attention_backward_kernel\S*Li(\d+ELb0ELb[01])E"  # bucket, terms, layout
MOST_INSTRUCTIONS = {"64ELb0ELb0": 2680, "128ELb0ELb0": 2000, "128ELb0ELb1": 2050}
MOST_INSTRUCTIONS |= {"256ELb0ELb0": 1800}
MOST_OF_WHOLE_ROWS = {"64": 1900, "128": 1800}  # of the forward, with 192 and 256 products
# Reads of fragments from shared memory, which bounds the backward, for these products.
MOST_FRAGMENTS = {"64ELb0ELb0": 168, "128ELb0ELb0": 176, "128ELb0ELb1": 144, "256ELb0ELb0": 96}
MOST_FRAGMENTS_OF_WHOLE_ROWS = {"64": 56, "128": 80}
# Numbers of channels and classes, pairs of a bias, rows of float64 by element: they begin at any
# address. A step's table of tensors.
ELEMENTWISE = {"STG": r"group_norm_pixel_sums"}
ELEMENTWISE |= {"LDG": r"group_norm_pixel|loss_forward_kernel|optimizer_step_kernel"}
ELEMENTWISE["LDG"] += r"|attention_backward_kernel\S*Li\d+ELb1E|attention_dbias_kernel"
ELEMENTWISE["LDG"] += r"|attention_delta_kernel\S*4SameIdE"
# By kernel: what a way through its main loop has at least, elements of a thread on it, and the most
# instructions an element of the shortest such way, a bit above what nvcc makes. With more than 9.8
# for each byte that is moved (19.7 of a read of 16 bits) 3 TB/s would wait for them. Elements have
# 16 bits, those of the optimizers 32.
READ, WRITE, SUM = r"LDG\.E\.128", r"STG\.E\.128", "FFMA|FADD|FMUL"
EXP, SHARE, RANDOM = r"MUFU\.EX2", "SHFL", r"IMAD\.(WIDE|HI)\.U32"
BITS16, NORM = r"I\S*Float16E+", r"INS_1[12]Norm(?:Forward|Backward)E\S*Float16E+"
MOST_PER_ELEMENT = {
    f"loss_forward_kernel{BITS16}": ({READ: 1}, 8, 10),
    f"loss_backward_kernel{BITS16}Lb1": ({READ: 1, WRITE: 1}, 8, 11),
    f"gate_forward_kernel{BITS16}Lb1": ({READ: 2, WRITE: 1, EXP: 8}, 8, 33),
    f"gate_backward_kernel{BITS16}Lb1": ({READ: 3, WRITE: 2, EXP: 8}, 8, 51),
    f"dropout_forward_kernel{BITS16}Lb1": ({READ: 2, WRITE: 1, RANDOM: 20}, 8, 22),
    f"branch_(for|back)ward_kernel{BITS16}Lb1": ({READ: 2, WRITE: 1, SUM: 16}, 8, 20),
    f"group_norm_(pixel_)?moments_kernel{BITS16}Lb1": ({READ: 1, SUM: 24}, 8, 12),
    f"group_norm_(pixel_)?forward_kernel{BITS16}Lb1": ({READ: 1, WRITE: 1, EXP: 8}, 8, 24),
    f"group_norm_(pixel_)?sums_kernel{BITS16}Lb1": ({READ: 2, EXP: 8}, 8, 34),
    f"group_norm_(pixel_)?backward_kernel{BITS16}Lb1": ({READ: 2, WRITE: 1, EXP: 8}, 8, 37),
    f"rotary_forward_kernel{BITS16}Lb[01]ELb1": ({READ: 2, WRITE: 2, SUM: 32}, 16, 8.5),
    f"rotary_normed_forward_kernel{BITS16}Lb[01]ELb1": ({READ: 2, WRITE: 2, SHARE: 5}, 16, 15),
    f"rotary_backward_kernel{BITS16}Lb[01]ELb1": ({READ: 4, WRITE: 2, SHARE: 5}, 16, 34),
    f"norm_forward_long_kernel{NORM}Lb1": ({READ: 1, SUM: 24}, 8, 14),
    f"norm_backward_kernel{NORM}Li1ELb1": ({READ: 2, WRITE: 1, SHARE: 10}, 8, 44),
    f"norm_backward_kernel{NORM}Li4ELb1": ({READ: 8, WRITE: 4, SHARE: 10}, 32, 31),
    f"norm_backward_means_kernel{NORM}Lb1": ({READ: 2, SUM: 40}, 8, 15),
    f"norm_backward_columns_kernel{NORM}Lb1": ({READ: 2, WRITE: 1, SUM: 64}, 8, 29),
    "gradient_norm_kernel": ({READ: 2, "FSEL|FADD|FFMA": 8}, 8, 9),
    "scale_gradients_kernel": ({READ: 2, WRITE: 2, "FMUL": 8}, 8, 9),
    r"optimizer_step_kernelILNS_9AlgorithmE0ELb0": ({READ: 8, WRITE: 6, "MUFU": 16}, 8, 92),
    r"optimizer_step_kernelILNS_9AlgorithmE[12]ELb0": ({READ: 6, WRITE: 4, SUM: 40}, 8, 48),
}
# The same of a whole kernel that has no loop: rows of one and of four packs a thread.
MOST_PER_ELEMENT_OF_ROWS = {
    rf"\dnorm_forward_kernel{NORM}Li1ELb1": ({READ: 2, WRITE: 1, SHARE: 5, SUM: 24}, 8, 35),
    rf"\dnorm_forward_kernel{NORM}Li4ELb1": ({READ: 8, WRITE: 4, SHARE: 5, SUM: 96}, 32, 20),
}
# Kernels whose main loop multiplies on tensor cores what cp.async brings, and those in TF32.
ON_TENSOR_CORES = r"attention_(forward|backward)_kernel|attention_decode_kernel.*TensorTile"
ON_TF32 = r"attention_(forward|backward|dquery)_plain_kernel.*Tf32"
TENSOR_CORES = f"{ON_TENSOR_CORES}|{ON_TF32}"
# Kernels that are launched with kFollows, from sm_90 on, and those that such a kernel comes after.
FOLLOWING = ("attention_backward_kernel", "attention_dquery_kernel", "attention_decode_join_kernel")
LEADING = ("attention_delta_kernel", "attention_backward_kernel", "attention_decode_kernel")
WAITS, STARTS_NEXT = "ACQBULK", "PREEXIT"
# Nothing that touches global memory, or goes another way, is in front of the wait.
NOT_BEFORE_A_WAIT = r"\b(LDG|LD|LDGSTS|STG|ST|ATOMG?|REDG?|CCTL|BRA|BRX|JMP|CALL|RET|EXIT)\b"


def check(name: str, binary: Path, arch: str = "") -> set[str]:
    """The names of the kernels, none of which waits for memory where it should not.

    `arch`: of a binary that has code of one alone, as in sm_80.

    A library that has passed is not disassembled again, which takes 20 seconds.
    """
    files = (binary, Path(__file__), Path(nvcc.__file__))
    return set(compiled.found(name, files, lambda: "\n".join(_checked(binary, arch))).split())


def check_order(name: str, code: str, arch: str) -> None:
    """What a kernel that follows another does first, and one that is followed at its end."""
    overlaps = int(arch.removeprefix("sm_")) >= 90
    is_following, is_leading = (any(of in name for of in names) for names in (FOLLOWING, LEADING))
    texts = [text for _, text in nvcc.instructions(code)]
    waits = [i for i, text in enumerate(texts) if WAITS in text]
    assert len(waits) == (is_following and overlaps), f"{name} waits at {waits}"
    if waits:
        before = "\n".join(texts[: waits[0]])
        assert not re.search(NOT_BEFORE_A_WAIT, before), f"{name} before its wait:\n{before}"
    assert (STARTS_NEXT in code) == (is_leading and overlaps), f"{name}, {STARTS_NEXT}"


def _checked(binary: Path, arch: str) -> list[str]:
    kernels, threads = nvcc.resources(binary), nvcc.max_threads(binary)
    for kernel, used in kernels.items():
        assert used["STACK"] == used["LOCAL"] == 0, f"{kernel} spills: {used}"
        fits = used["REG"] * threads.get(kernel, 1024) <= REGISTERS
        assert fits, f"{kernel} cannot start: {used}"
        if re.search(PLACED, kernel[1]):  # what is in front of it, of ours or the system
            assert used["SHARED"] % 1024 == 0, f"shared memory of {kernel} is not aligned: {used}"
        if re.search(TWICE, kernel[1]):
            taken = -(-used["REG"] // 8) * 8 * threads[kernel]  # given out by eights
            assert 2 * taken <= REGISTERS, f"{kernel} does not fit a multiprocessor twice: {used}"
    for (of, name), code in nvcc.machine_code(binary).items():
        check_order(name, code, of or arch)
        for split in nvcc.split_accesses(code):
            allowed = ELEMENTWISE[split.partition(" ")[0]]
            assert re.search(allowed, name), f"{name} has no 16-byte access, but {split}"
        for whole, table in ((False, MOST_PER_ELEMENT), (True, MOST_PER_ELEMENT_OF_ROWS)):
            for kernel, (needs, elements, most) in table.items():
                if re.search(kernel, name):
                    issued = nvcc.fewest(code, needs, whole)
                    assert issued <= most * elements, f"{name}: {issued / elements} an element"
        assert "CCTL.E.PF2" in code or not re.search(AHEAD, name), f"{name} asks for no row"
        if match := re.search(WITH_BIAS, name):
            bucket, products = int(match[2] or match[3]), nvcc.products_on_the_way(code)
            queries = 16 if bucket == 256 or match[3] else 32  # of a strip, see table.h
            whole = bucket // 16 * queries // 8  # of keys by queries, 16 columns and 8 queries each
            assert products and min(products) >= whole, f"{name} waits for a bias: {products}"
        if re.search(TENSOR_CORES, name):
            product = r"HMMA.*\.TF32" if re.search(ON_TF32, name) else "HMMA"
            loops = [loop for loop in nvcc.loops(code) if "LDGSTS" in loop]
            main = [loop for loop in loops if re.search(product, loop)]
            assert main, f"{name} has no loop of tensor cores and asynchronous copies"
            assert not re.search("LDL|STL", "".join(main)), f"{name} has local memory in its loop"
            issued = max(loop.count("\n") for loop in main)
            read = max(loop.count("LDSM") for loop in main)
            if match := re.search(WITHOUT_TERMS, name):
                assert issued <= MOST_INSTRUCTIONS[match[1]], f"{name}: {issued} instructions"
                assert read <= MOST_FRAGMENTS[match[1]], f"{name}: {read} reads of fragments"
            whole = re.search(OF_WHOLE_ROWS, name)
            if whole:
                most = MOST_FRAGMENTS_OF_WHOLE_ROWS[whole[1]]
                assert issued <= MOST_OF_WHOLE_ROWS[whole[1]], f"{name}: {issued} instructions"
                assert read <= most, f"{name}: {read} reads of fragments"
            for piece in PIECES if re.search(OF_TILES, name) else ():
                has, wanted = re.search(piece, "".join(main)), not whole or piece == PIECES[0]
                assert bool(has) == wanted, f"{name} and {piece} in its loop"
    return [name for _, name in kernels]


def test_built_kernels():
    if not _C.build_info()["cuda_archs"]:
        pytest.skip("built without CUDA")
    name = "libonepass_cuda"
    kernels = check(name, _library.library_directory() / f"{name}.so")
    for kernel in KERNELS:
        assert any(kernel in name for name in kernels), kernel


def marked(source: str, arch: str):
    """Quick cases have no register left, on the architecture whose speed is promised.

    The others take minutes to compile; all are in the built library, for the oldest architecture.
    """
    is_quick = source in QUICK and arch == "sm_90"
    return pytest.param(source, arch, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("source, arch", [marked(*pair) for pair in COMPILED])
def test_kernels_of_a_release(source, arch):
    """Also for architectures that this build leaves out."""
    name = f"{source.replace('/', '_').removesuffix('.cu')}-{arch}"
    assert check(name, nvcc.cubin(CUDA / source, arch), arch) or source in WITHOUT_KERNELS


def test_kernels_that_follow_are_looked_at():
    """Every launch with kFollows is of a kernel whose order is checked above."""
    text = "".join(file.read_text() for file in CUDA.rglob("*.cu*"))
    launched = set(re.findall(r"launch<\s*(\w+)(?:<[^>]*>)?,\s*kFollows>", text))
    assert launched == set(FOLLOWING) and len(re.findall(r"\bkFollows>", text)) == len(FOLLOWING)
    assert len(re.findall(r"\bwait_for_kernel_before\(\);", text)) == len(FOLLOWING)


def test_code_in_front_of_a_wait_is_found():
    """And a wait that is missing, or that the code of an older device has."""
    name, code = FOLLOWING[1], "".join
    line = "        /*{:04x}*/                   {} ;  /* 0x0 */\n".format
    right = [line(0, "S2R R7, SR_TID.X"), line(16, "LDC R1, c[0x0][0x28]"), line(32, WAITS)]
    load, leave = line(48, "LDG.E R0, desc[UR4][R2.64]"), line(64, "@P0 EXIT")
    check_order(name, code([*right, load, leave]), "sm_90")
    check_order(name, code([load, leave]), "sm_80")
    for wrong in ([load, *right], [leave, *right], [load], [*right, *right]):
        with pytest.raises(AssertionError):
            check_order(name, code(wrong), "sm_90")
    with pytest.raises(AssertionError):
        check_order(name, code(right), "sm_80")
    with pytest.raises(AssertionError):
        check_order(LEADING[0], load, "sm_90")


def test_split_accesses_are_found():
    def found(*texts: str) -> list[str]:
        line = "        /*{:04x}*/                   {} ;  /* 0x0 */\n".format
        return nvcc.split_accesses("".join(line(16 * i, text) for i, text in enumerate(texts)))

    def stores(*offsets: int, wide: str = "") -> list[str]:
        return [f"STG.E{wide} desc[UR4][R2.64+{offset:#x}], R7" for offset in offsets]

    split, wide = stores(0, 4, 12, 8), stores(0, 8, 16, 24, wide=".64")
    assert found(*wide, "BRA 0x10", *split) == ["STG 8 8 8 8", "STG 4 4 4 4"]
    loads = [f"LDG.E R9, desc[UR4][R2.64+{4 * i:#x}]" for i in range(4)]
    assert found(*loads) == ["LDG 4 4 4 4"]
    for whole in (
        stores(0, 16, wide=".128"),
        split[:3],
        [*split[:2], "BRA 0x10", *split[2:]],
        [*split[:2], "IADD3 R2, P0, R4, 0x1, RZ", *split[2:]],
        [f"@P{i} {text}" for i, text in enumerate(split)],
        [text.replace("R2", f"R{2 * i}") for i, text in enumerate(split)],
        stores(0, 16, 32, 48),
    ):
        assert not found(*whole), whole


def test_the_shortest_way_is_found():
    """Past a slow path, twice through an inner loop if it has to, and to the end without a loop."""
    load, product, store = "LDG.E.128 R4, [R2]", "FFMA R0, R0, R4, R0", "STG.E.128 [R2], R4"
    texts = [load, "@!P0 BRA 0x40", "CALL.REL.NOINC 0x90", "NOP", product, "@P1 BRA 0x40", store]
    texts += ["@P2 BRA 0x0", "EXIT", "RET.REL.NODEC R6 0x0"]
    code = "".join(f"        /*{16 * i:04x}*/  {text} ;\n" for i, text in enumerate(texts))
    assert nvcc.fewest(code, {READ: 1, WRITE: 1}) == 6
    assert nvcc.fewest(code, {READ: 1, WRITE: 1, SUM: 2}) == 8
    assert nvcc.fewest(code, {SUM: 1}) == 2
    assert nvcc.fewest(code, {READ: 1, SUM: 1}, whole=True) == 7
    assert nvcc.fewest(code, {"MUFU": 1}) == float("inf")


def test_a_kernel_is_one_of_an_architecture():
    """In a library of several, each has registers, bounds and code of its own."""
    binary = nvcc.cubin(Path(__file__).with_name("two_architectures.cu"), "sm_80", "sm_90")
    of = [nvcc.resources(binary), nvcc.max_threads(binary), nvcc.machine_code(binary)]
    old, new = ([facts[arch, "kernel"] for facts in of] for arch in ("sm_80", "sm_90"))
    assert old[0]["SHARED"] < 4096 <= new[0]["SHARED"] and (old[1], new[1]) == (128, 256)
    assert "STS" in new[2] and "STS" not in old[2]
    alone = nvcc.cubin(Path(__file__).with_name("two_architectures.cu"), "sm_90")
    assert nvcc.max_threads(alone) == {("", "kernel"): 256}
