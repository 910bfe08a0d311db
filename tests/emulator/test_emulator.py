"""The emulator's own tests: planted faults are found, and correct kernels pass silently."""

import pytest

from tests.emulator import emulated

# The build that finds each fault, and its message. A fault that may show in the plain build as well
# (as poison in the results, say) is listed for the build that finds it in any order.
CAUGHT_BY = {
    "read_after_write": ("thread", "data race"),
    "write_after_read": ("thread", "data race"),
    "hidden_behind_a_shuffle": ("thread", "data race"),
    "add_across_blocks": ("thread", "data race"),
    "tickets": ("thread", "data race"),
    "global_out_of_bounds": ("address", "heap-buffer-overflow"),
    "shared_out_of_bounds": ("address", "use-after-poison"),
    "misaligned": ("plain", "a load of 16 bytes at a misaligned address"),
    "misaligned_addition": ("plain", "red.v4 of 16 bytes at a misaligned address"),
    "more_shared_memory_than_launched_with": ("plain", "takes 2048 bytes of shared memory"),
    "lane_missing": ("plain", "lane 31 is named in the mask of __shfl_xor_sync and did not arrive"),
    "lane_not_in_its_mask": ("plain", "whose lane is not in the mask"),
    "barrier_that_some_never_reach": ("plain", "did not arrive"),
    "another_ldmatrix": ("plain", "meet in ldmatrix.x4"),
    "exact_powers": ("plain", "wrong value"),
    "exact_reciprocals": ("plain", "wrong value"),
    "flushed_power": ("plain", "wrong value: output[0] is -1"),
    "flushed_reciprocal": ("plain", "wrong value: output[0] is -1"),
    "sums_of_bfloat16_rounded": ("plain", "wrong value: output[0] is -1"),
    "sums_of_float16_rounded": ("plain", "wrong value: output[0] is -1"),
    "neighbours_in_any_layout": ("plain", "wrong value: output[1] is"),
    "uninitialised": ("plain", "wrong value: output[17] is"),
    "read_before_the_wait": ("plain", "wrong value"),
    "wait_for_the_wrong_group": ("plain", "wrong value: output[4] is"),
    "overwrite_in_flight": ("plain", "wrong value"),
    "copy_into_what_is_read": ("thread", "data race"),
    "copy_twice_in_flight": ("plain", "cp.async into a buffer whose last is in flight"),
    "overwrite_the_source_in_flight": ("plain", "the source of a cp.async changes"),
    "copy_before_the_source_is_written": ("thread", "data race"),
    "misaligned_copy": ("plain", "of 8 bytes at a misaligned address"),
    "read_few_before_the_wait": ("plain", "wrong value"),
    "copy_into_a_part_in_flight": ("plain", "cp.async into a buffer whose last is in flight"),
    "copy_that_is_left_out": ("plain", "wrong value: output[33] is 40, not 33"),
    "end_in_flight": ("plain", "a thread ends with a cp.async in flight"),
    "extra_pass": ("plain", "read 512 written 256"),
    "beside_a_tensor": ("plain", "wrote beside a tensor of 256 bytes"),
    "read_beside_a_tensor": ("plain", "a load of 4 bytes beside a tensor"),
}
# Settings that must find a fault each, and those under which it is none.
TRUNCATES = ([{"truncates": 16}, {"truncates": 8}], [{"truncates": 0}])  # H100, A100
DEPENDS_ON = {
    "sums_of_bfloat16_rounded": TRUNCATES,
    "sums_of_float16_rounded": TRUNCATES,
    "neighbours_in_any_layout": (
        [{"capability": 80}, {"capability": 86}],
        [{"capability": 90}, {"capability": 120}],
    ),
}
# The four numbers that must be reported for a kernel or for a line in it: measured and minimal.
COUNTED = {
    "without_a_swizzle": "\t16\t4\t",
    "strided_loads": "\t16\t8\t16\t8\n",
    "strided_additions": "\t32\t8\n",
    "copies_to_one_bank": "\t16\t2\t16\t2\t",
}
SEEDS = 3


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_planted_fault_is_caught(name):
    build, words = CAUGHT_BY[name]
    caught, _ = DEPENDS_ON.get(name, ([{}], []))
    for seed in range(SEEDS):  # whatever the order of threads and blocks
        for settings in caught:
            result = emulated.run(emulated.program("faults", build), name, seed=seed, **settings)
            assert result.returncode != 0, f"seed {seed}, {settings}: not caught"
            assert words in result.stdout + result.stderr, result.stderr[-2000:]


@pytest.mark.parametrize("name", DEPENDS_ON)
def test_what_finds_a_fault_is_the_setting(name):
    executable = emulated.program("faults", "plain")
    caught, others = DEPENDS_ON[name]
    for settings in others:
        assert emulated.run(executable, name, **settings).returncode == 0, settings
    for settings in caught + others:
        result = emulated.run(executable, name, "right", **settings)
        assert result.returncode == 0 and not result.stderr, f"{settings}: {result.stderr[-2000:]}"


@pytest.mark.parametrize("build", emulated.BUILDS)
def test_right_kernels_pass_in_silence(build):
    executable = emulated.program("faults", build)
    names = emulated.run(executable).stdout.split()
    assert set(names) == set(CAUGHT_BY)
    for name in names:
        for seed in range(1 if build == "thread" else SEEDS):  # it takes its time
            result = emulated.run(executable, name, "right", seed=seed)
            assert result.returncode == 0 and not result.stderr, f"{name}: {result.stderr[-2000:]}"


@pytest.mark.parametrize("name", COUNTED)
def test_accesses_that_take_more_than_they_must_are_told(name):
    executable = emulated.program("access_faults", "accesses")
    assert set(emulated.run(executable).stdout.split()) == set(COUNTED)
    for seed in range(SEEDS):
        result = emulated.run(executable, name, seed=seed)
        assert result.returncode == 1 and COUNTED[name] in result.stdout, result.stdout
        result = emulated.run(executable, name, "right", seed=seed)
        assert result.returncode == 0 and not result.stderr, result.stdout


@pytest.mark.parametrize("build", emulated.BUILDS)
def test_fragments_lie_where_the_ptx_isa_says(build):
    result = emulated.run(emulated.program("fragments", build))
    assert result.returncode == 0 and not result.stderr, result.stdout + result.stderr
