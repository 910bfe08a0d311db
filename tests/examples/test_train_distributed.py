"""examples/train_distributed.py: the same run on any number of processes, with any --parallel."""

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from onepass import numerics
from onepass.distributed.ring import Ring
from onepass.swapping import classes
from tests.distributed.ranks import distributed, on_ranks, run

pytestmark = distributed

SCRIPT = Path(__file__).parents[2] / "examples" / "train_distributed.py"
SMALL = (
    "--quick", "--batch", "4", "--dropout", "0", "--log-every", "3", "--threads", "1",
    "--text", argparse.__file__,
)  # fmt: skip
WAYS = ("ddp", "fsdp", "context")


def example():
    spec = importlib.util.spec_from_file_location("train_distributed_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(*flags, double=False):
    """Losses and first step of a run, on a process of a group."""
    module = example()
    if double:
        module.GPT = lambda *args, of=module.GPT: of(*args).double()
    found = module.train(module.parse([*SMALL, *flags]), torch.device("cpu"))
    return found["losses"], found["first_step"]


@functools.cache
def by_torch(steps):
    """Losses of torch's modules and AdamW, in one process and in two by DDP, and in float64."""
    body = functools.partial(trained, "--stock", "--steps", str(steps))
    runs = [run(size, body)[0][0] for size in (1, 2)]
    exact = run(1, functools.partial(body, double=True))[0][0]
    return torch.tensor(runs), torch.tensor([exact] * 2, dtype=torch.float64)


def check(losses, steps):
    """By the numerics rule; a mean of two means rounds once more, as torch's does."""
    base, reference = by_torch(steps)
    assert len(losses) == steps and losses[-1] < losses[0] - 0.2  # it has learnt something
    numerics.assert_close(torch.tensor([losses] * 2), reference, base, case="losses")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "sizes", [(2, 1), *(pytest.param(s, marks=pytest.mark.slow) for s in ((4, 1), (1, 2)))], ids=str
)
def test_a_run_goes_on_with_other_processes(way, sizes, tmp_path):
    runs = []
    for size, steps in zip(sizes, ("6", "16"), strict=True):
        flags = ["--checkpoint", str(tmp_path), "--steps", steps]
        flags += ["--parallel", way] if size > 1 else []
        found = run(size, trained, *flags)
        assert all(of == found[0] for of in found)  # every process reports the mean
        runs.append(found[0])
    (first, _), (losses, step) = runs
    assert step == 6
    check(first + losses, 16)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_dropout_goes_on_bit_for_bit(way, tmp_path):
    flags = ("--parallel", way, "--dropout", "0.2")
    whole = run(2, trained, *flags, "--steps", "6")[0][0]
    folder = ("--checkpoint", str(tmp_path), "--save-every", "3")
    first = run(2, trained, *flags, *folder, "--steps", "3")[0][0]
    losses, step = run(2, trained, *flags, *folder, "--steps", "6")[0]
    assert step == 3 and first + losses == whole
    other = run(2, trained, *flags, "--steps", "6", "--seed", "1")[0][0]
    assert other != whole


def body_of_what_runs(way):
    """(kinds of modules that run on onepass, exchanges of the ring in a step)"""
    module, exchanged = example(), []
    args = module.parse([*SMALL, "--parallel", way, "--steps", "1"])
    model, optimizer = module.build(args, torch.device("cpu"))
    kinds = {type(m).__name__ for m in model.modules() if isinstance(m, classes.Swapped)}
    peer = Ring.peer
    Ring.peer = lambda self, steps: exchanged.append(steps) or peer(self, steps)
    try:
        tokens = torch.arange(4 * 64).reshape(4, 64) % 256
        module.train_step(model, optimizer, (tokens, tokens), args)
    finally:
        Ring.peer = peer
    return kinds, len(exchanged), module.WAYS[way][1](tokens, tokens)[0].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_is_what_the_way_says(way):
    results = run(2, body_of_what_runs, way)
    tokens = []
    for kinds, exchanged, mine in results:
        assert any("LayerNorm" in name for name in kinds), kinds
        assert (exchanged > 0) == (way == "context")
        tokens += [token for row in mine for token in row]
    assert sorted(tokens) == sorted(n % 256 for n in range(4 * 64))  # each once


@pytest.mark.slow
def test_as_a_command(tmp_path):
    """torchrun with two processes, then one process by itself."""
    flags = [*SMALL, "--checkpoint", "gpt", "--json", "out.json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    commands = (
        [*torchrun, "--nproc-per-node", "2", SCRIPT, *flags, "--parallel", "fsdp", "--steps", "4"],
        [sys.executable, SCRIPT, *flags, "--steps", "16"],
    )
    losses = []
    for processes, command in zip((2, 1), commands, strict=True):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "out.json").read_text())
        assert found["processes"] == processes and found["swapped"] is True
        assert (
            len(found["step_seconds"]) == len(found["losses"])
            and found["tokens_per_step"] == 4 * 64
        )
        assert "tokens/s" in done.stdout and f"on {processes} processes" in done.stdout
        losses += found["losses"]
    assert "from step 4 to 16" in done.stdout
    check(losses, 16)


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path):
    run(1, trained, "--checkpoint", str(tmp_path), "--steps", "2")
    (tmp_path / "step-00000007").mkdir()
    assert run(1, trained, "--checkpoint", str(tmp_path), "--steps", "3")[0][1] == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--save-every", "0"], "--save-every must be at least 1, got 0"),
        (["--width", "33"], "--width must be a multiple of --heads, got 33, 2"),
        (["--block", "63", "--parallel", "context"], "--block must be a multiple of 2 here"),
        (["--text", "/no/such/file"], "--text must name readable files: /no/such/file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, flags, message):
    assert example().main([*SMALL, *flags]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith(f"train_distributed: {message}")
    assert errors.count("\n") == 1


@on_ranks(2)
def test_a_batch_that_does_not_divide():
    module = example()
    with pytest.raises(module.BadInput, match="--batch must be a multiple of the 2 processes"):
        module.train(module.parse([*SMALL, "--batch", "3"]), torch.device("cpu"))


def test_another_runs_checkpoint_is_refused(capsys, tmp_path):
    flags = ["--checkpoint", str(tmp_path), "--steps", "1"]
    assert example().main([*SMALL, *flags]) == 0
    assert example().main([*SMALL, *flags, "--width", "16"]) == 2
    assert "--checkpoint holds another run, of {'layers': 2" in capsys.readouterr().err


def body_of_averages():
    """The gradients of each process equal its rank; some parameters have no gradient."""
    module, rank = example(), torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(rank + 10 * number))
    module.average_gradients(model)
    return [sorted(set(p.grad.flatten().tolist())) for p in model.parameters()]


def test_gradients_are_averaged():
    assert run(2, body_of_averages) == [[[0.5], [10.5], [20.5], [30.5]]] * 2
