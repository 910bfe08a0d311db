"""Every instance of a kernel once, on the device: `python -m tests.device.smoke FAMILY`.

The calls are those of test_each_instance of the family, which knows under the emulator that no
instance is left out (but one that only a device with less shared memory takes). A call has failed
if it raises, or if its results are far from the CPU's. The next ones go on with the CPU's results,
so that one fault is one line. `tests.support.resumed` also goes on after a call that ended the
process.
"""

import contextlib
import functools
import importlib
import sys

import torch
from torch import Tensor

from tests.emulator.executors import DEVICE, OnDevice, replaced_operators
from tests.support import resumed

# Of a result's root mean square: rounding, with room; the tests of values have the exact rule.
FAR = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
NOTHING = 1e-4  # of results that are rounding errors themselves, such as attention's lse_rest


class Smoke(OnDevice):
    """In the place of the emulator; of its settings a device takes the misaligned bytes."""

    done = (None,)  # no counts

    def __init__(self, family: str, cases: resumed.Cases):
        super().__init__()
        self.family, self.cases, self.count = family, cases, 0

    def set(self, shift: int | None = None, **settings: int) -> None:
        if shift is not None:
            self.shift = shift

    @contextlib.contextmanager
    def under_the_package(self):
        with replaced_operators(lambda op: functools.partial(self.run, op)):
            yield

    @contextlib.contextmanager
    def sanitized(self, build: str, *kernels: str, **settings: int):
        yield

    def run(self, op, *arguments, **keywords):
        on_device = functools.partial(super().run, op)
        copies = torch.utils._pytree.tree_map_only(Tensor, _copied(), (arguments, keywords))
        expected = op(*arguments, **keywords)

        def call() -> None:
            given, named = copies
            found = on_device(*given, **named)
            compare((found, given, named), (expected, arguments, keywords))

        self.case(f"{op._schema.name.partition('::')[2]}({described(arguments)})", call)
        return expected

    def case(self, name: str, call) -> None:
        """Runs `call`, unless a process before this one did; an error is written down."""
        self.count += 1
        name = f"{self.family} {self.count}: {name}"
        if name in self.cases.done:
            return
        self.cases.begin(name)
        try:
            call()
        except Exception as error:
            why = (str(error).strip().splitlines() or [""])[0]
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            self.cases.end("failed", f"{type(error).__name__}: {why}"[:300])
        else:
            self.cases.end("passed")


def _copied():
    """Copies of tensors with the storages that they share."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept = storages.setdefault(storage.data_ptr(), storage.clone())
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(kept, tensor.storage_offset(), tensor.shape, tensor.stride())

    return copy


def compare(found, expected) -> None:
    """Raises AssertionError where a result is far from the CPU's."""
    leaves = torch.utils._pytree.tree_leaves
    for number, (one, other) in enumerate(zip(leaves(found), leaves(expected), strict=True)):
        if not isinstance(other, Tensor) or other.numel() == 0:
            continue
        assert one.shape == other.shape and one.dtype == other.dtype, f"result {number}"
        if not other.is_floating_point():
            continue  # codes of 8 bits may be neighbours; the tests of values look at them
        one, wide = one.double(), other.double()
        assert torch.equal(one.isfinite(), wide.isfinite()), f"result {number}: not finite"
        one, wide = (values.nan_to_num(0.0, 0.0, 0.0) for values in (one, wide))
        off, size = ((values.square().mean().sqrt()).item() for values in (one - wide, wide))
        assert off <= FAR[other.dtype] * size + NOTHING, (
            f"result {number} is off by {off / max(size, NOTHING):.1e}"
        )


def described(arguments) -> str:
    """The dtypes and shapes of tensors, and the options that are no tensors."""
    words = []
    for value in arguments:
        if isinstance(value, Tensor):
            shape = "x".join(map(str, value.shape))
            words.append(f"{str(value.dtype).removeprefix('torch.')} {shape}")
        elif isinstance(value, list | tuple):
            words.append(f"{len(value)} values")
        elif value is not None:
            words.append(str(value))
    return ", ".join(words)


def run(family: str, cases: resumed.Cases) -> int:
    """The calls of a family; returns how many there are."""
    smoke = Smoke(family, cases)
    where = {"modulated_norm": "norm.test_forms_cuda"}.get(family, f"{family}.test_cuda")
    module = importlib.import_module(f"tests.{where}")
    if family == "optimizer":  # whose steps have tensors on the device: its state stays there
        check = module.check
        module.check = lambda _, call: smoke.case(
            f"step, algorithm {call.algorithm}, {len(call.tensors)} tensors",
            functools.partial(check, None, call),
        )
        module.each_instance(smoke, None)
    else:
        with smoke.under_the_package():
            module.each_instance(smoke)
    return smoke.count


def main(family: str) -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cases = resumed.Cases.of_environment()
    count = run(family, cases)
    print(f"{count} calls on {DEVICE}")
    return 1 if any(case.outcome == "failed" for case in cases.done.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
