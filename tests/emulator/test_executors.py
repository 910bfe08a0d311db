"""The executors' own tests: errors in the tests' library are reported."""

import pytest
import torch

from onepass import functional
from tests.emulator import emulated
from tests.emulator.executors import _library


def test_a_check_that_fails_in_a_kernel_is_an_exception(cuda):
    x = torch.randn(64, 4096)
    cuda.set(shared=16)
    with pytest.raises(RuntimeError, match="emulator: .* bytes of shared memory in one block"):
        functional.layer_norm(x, (4096,))
    cuda.set(shared=227 * 1024)
    assert not functional.layer_norm(x, (4096,)).isnan().any()


def test_what_runs_elsewhere_is_the_cpus_again(emulator):
    x = torch.randn(3, 72)
    with emulator.under_the_package():
        functional.rms_norm(x, (72,))
    functional.rms_norm(x, (72,))
    assert [call["op"] for call in emulator.done] == ["norm_forward"]


def test_bytes_between_the_members_of_a_struct_are_zero(cuda, tmp_path):
    """Old bytes there could look like an address and be relocated as one."""
    sizes = [1237 + i for i in range(20)]
    _library().emulated_keep(str(tmp_path).encode())
    torch.ops.onepass.gradient_norm([torch.randn(n) for n in sizes], 2.0)
    _library().emulated_keep(b"")
    (file,) = tmp_path.iterdir()
    kept = file.read_bytes()
    for numel in sizes:
        at = kept.index(numel.to_bytes(8, "little")) + 8  # of FlatTensor: then a dtype of 4 bytes
        assert kept[at + 4 : at + 8] == bytes(4)


def test_a_call_that_comes_to_something_else_is_told(cuda, tmp_path):
    _library().emulated_keep(str(tmp_path).encode())
    y = functional.dropout(torch.randn(1000), 0.3)
    _library().emulated_keep(b"")
    (file,) = tmp_path.iterdir()
    program = emulated.program("replay", "plain", "dropout.cu")
    result = emulated.run(program, file)
    assert result.returncode == 0 and not result.stderr, result.stderr
    kept = bytearray(file.read_bytes())
    kept[kept.rfind(y.numpy().tobytes()) + 17] ^= 1  # a byte of the result
    file.write_bytes(kept)
    result = emulated.run(program, file)
    assert result.returncode == 3 and "comes to something else" in result.stderr
