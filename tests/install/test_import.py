"""The cost and side effects of `import onepass`, measured in separate processes."""

import os
import sys

import torch

from onepass._imported import is_a, is_dtensor
from onepass._ops import attention
from tests.support import fresh

# Expensive modules of torch that its own import leaves alone.
EXPENSIVE = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")
LOADED = f"""
import sys, torch
before = {{name for name in {EXPENSIVE} if name in sys.modules}}
import onepass
print([name for name in {EXPENSIVE} if name in sys.modules and name not in before])
"""


def run(code: str, **variables: str) -> str:
    # inductor, where this process has it, wrote into the environment where its folder is
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")}
    return fresh.run(code, env=inherited | variables, check=True).stdout.strip()


def test_no_compiler_is_imported():
    assert run(LOADED) == "[]"


def test_nothing_is_written(tmp_path):
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    folders = {name: tmp_path / name.lower() for name in names}
    for folder in folders.values():
        folder.mkdir()
    code = "import os; os.chdir(os.environ['HOME']); import onepass"
    run(code, **{name: str(folder) for name, folder in folders.items()})
    assert [str(path) for path in tmp_path.rglob("*") if path not in folders.values()] == []


def test_the_mark_of_a_constant_is_torchs():
    def function():
        pass

    torch.compiler.assume_constant_result(function)
    assert vars(attention._tf32_is_allowed).items() >= vars(function).items() != {}.items()


def test_instances_of_what_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.nn.attention.bias", raising=False)
    assert not is_a(torch.ones(1), "torch.nn.attention.bias", "CausalBias")
    monkeypatch.undo()  # before the import, which would make a second class of that name
    from torch.nn.attention.bias import causal_lower_right

    assert is_a(causal_lower_right(2, 3), "torch.nn.attention.bias", "CausalBias")
    assert not is_a(torch.ones(1), "torch.nn.attention.bias", "CausalBias")
    assert not is_dtensor(torch.ones(1))
