"""The CPU seconds that a run of the tests takes, by file: those of its processes and of their
children, and of processes that report theirs (tests/distributed/ranks.py).

A table at the end of each run names the files that take the most, with --durations=0 all of them.
People run `make test` while they work: there a file that takes more than its budget is named, and
one that takes OVER times as much fails the run. CPU time grows on a busy machine, but
not sixfold: budgets are about twice what was measured.
"""

import time
from collections import Counter

import pytest

from tests.support import compiled

QUICK = "not slow"  # the run that has budgets
USUAL = 30  # seconds, of a file without a budget of its own
BUDGETS = {  # shares.py begins with the largest
    "tests/all_families/test_compiled.py": 70,
    "tests/all_families/test_derivatives.py": 40,
    "tests/all_families/test_lower_levels.py": 40,
    "tests/all_families/test_opcheck.py": 40,
    "tests/all_families/test_tracing.py": 40,
    "tests/attention/test_contract.py": 20,
    "tests/attention/test_cuda.py": 50,
    "tests/attention/test_cuda_backward.py": 35,
    "tests/attention/test_extremes.py": 25,
    "tests/attention/test_layouts.py": 20,
    "tests/attention/test_packed.py": 20,
    "tests/attention/test_torch.py": 40,
    "tests/attention/test_values.py": 80,
    "tests/attention_decode/test_contract.py": 30,
    "tests/attention_decode/test_cuda.py": 30,
    "tests/attention_decode/test_torch.py": 40,
    "tests/attention_decode/test_values.py": 45,
    "tests/bench/test_attention.py": 40,
    "tests/bench/test_gpu_report.py": 40,
    "tests/bench/test_harness.py": 20,
    "tests/compare/test_command.py": 45,
    "tests/compare/test_pieces.py": 40,
    "tests/distributed/test_checkpoint.py": 20,
    "tests/distributed/test_placements.py": 40,
    "tests/emulator/test_emulator.py": 25,
    "tests/examples/test_notebooks.py": 20,
    "tests/faults/test_allocations.py": 20,
    "tests/faults/test_fuzz.py": 40,
    "tests/faults/test_input_classes.py": 40,
    "tests/faults/test_optim_interrupts.py": 50,
    "tests/faults/test_swap_interrupts.py": 40,
    "tests/install/test_cuda_binary.py": 60,
    "tests/integrations/test_transformers.py": 25,
    "tests/integrations/test_transformers_attach.py": 25,
    "tests/integrations/test_transformers_use.py": 40,
    "tests/memory/test_memory.py": 35,
    "tests/norm/test_cuda.py": 30,
    "tests/norm/test_values.py": 40,
    "tests/optim/test_contract.py": 15,
    "tests/optimizer/test_cuda.py": 30,
    "tests/swap/test_norms.py": 20,
    "tests/swap/test_swap.py": 15,
    "tests/swap/test_torch.py": 15,
    "tests/swap/test_transformers.py": 10,
    "tests/swap/test_verify.py": 20,
}
OVER = 3
SHOWN = 20
STARTING = "(starting and collecting)"
COMPILING = "(compiling)"
# CPU seconds reported by processes that work for this one and are not its children.
elsewhere = 0.0


def spent() -> float:
    return time.process_time() + compiled.children() + elsewhere


def dear(costs: dict[str, float], times: int = 1) -> list[str]:
    """The files that took more than so many times their budget."""
    files = (file for file in costs if not file.startswith("("))
    return [file for file in files if costs[file] > times * BUDGETS.get(file, USUAL)]


def is_quick(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == QUICK


class Costs:
    def __init__(self, config: pytest.Config):
        self.config = config
        self.costs: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        begin, compiling = spent(), compiled.seconds
        result = yield
        compiling = compiled.seconds - compiling
        self.costs[COMPILING] += compiling
        self.costs[item.nodeid.partition("::")[0]] += spent() - begin - compiling
        return result

    def pytest_collection_finish(self) -> None:
        self.costs[STARTING] += spent()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """A worker of a parallel run has ended."""
        self.costs.update(getattr(node, "workeroutput", {}).get("costs", {}))

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = dict(self.costs)
        elif is_quick(self.config) and dear(self.costs, OVER):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        shown = None if self.config.getoption("durations") == 0 else SHOWN
        terminalreporter.section("CPU seconds by file")
        for file, seconds in self.costs.most_common(shown):
            terminalreporter.line(f"{seconds:8.1f}  {file}")
        terminalreporter.line(f"{sum(self.costs.values()):8.1f}  in all")
        for file in dear(self.costs) if is_quick(self.config) else ():
            word = "FAILED" if file in dear(self.costs, OVER) else "more than its budget"
            budget = BUDGETS.get(file, USUAL)
            terminalreporter.line(
                f"{word}: {file} took {self.costs[file]:.0f} CPU seconds of {budget} "
                "(tests/support/costs.py): make its tests cheaper or mark some slow"
            )
