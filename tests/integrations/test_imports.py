"""Modules of `onepass.integrations` import their package when they are used, and name it if it is
missing."""

from pathlib import Path

import pytest

from onepass import integrations
from tests.support import fresh

PACKAGES = ("accelerate", "diffusers", "flash_attn", "lightning", "peft", "pytorch_lightning",
            "timm", "torchtitan", "transformers")  # fmt: skip
NEEDS_NONE = ("diffusers", "flash_attn", "quantized_layers")
# Module, its use, and what the error names without the package. The last two import theirs: their
# classes are subclasses of its.
USES = {
    "lightning": ("ours.Swap", "neither lightning nor pytorch-lightning is installed: pip install"),
    "peft": ("ours.register()", "peft must be installed, with what it imports itself: pip install"),
    "timm": ("ours.register()", "pip install --upgrade timm"),
    "torchtitan": ("ours", "torchtitan"),
    "transformers": ("ours", "the package transformers is not installed: pip install transformers"),
}
WITHOUT = """
import sys, torch
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {packages}:
            return self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_every_module_is_here():
    folder = Path(integrations.__file__).parent
    assert {*USES, *NEEDS_NONE} == {p.stem for p in folder.iterdir() if p.stem[0] != "_"}


def test_onepass_imports_none_of_them():
    """Nor does a swap of torch's own modules, where they are installed."""
    modules = ", ".join(
        f"onepass.integrations.{n}" for n in (*NEEDS_NONE, "lightning", "peft", "timm")
    )
    none = f"assert not set(sys.modules) & {{*{PACKAGES}, "
    code = (
        "import sys, torch, onepass\n"
        "model = torch.nn.TransformerEncoderLayer(8, 2)\n"
        "onepass.swap(model).verify(torch.randn(3, 2, 8))\n"
        f"{none}'onepass.integrations'}}\n"
    )
    code += WITHOUT.format(packages=PACKAGES) + f"import {modules}\n{none}}}"
    fresh.run(code, check=True)


def test_an_old_transformers_is_named():
    result = fresh.run(
        "import sys, types; old = sys.modules['transformers'] = types.ModuleType('transformers')\n"
        "old.__version__ = '4.40'; import onepass.integrations.transformers"
    )
    assert "must have AttentionMaskInterface, got version 4.40" in result.stderr


@pytest.mark.parametrize("name", USES)
def test_what_is_missing_is_named_when_it_is_used(name):
    use, message = USES[name]
    code = WITHOUT.format(packages=PACKAGES) + f"import onepass.integrations.{name} as ours\n"
    done = fresh.run(f"{code}print('imported')\n{use}")
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert "Error: " in error and message in error
    assert ("imported" in done.stdout) == (name not in ("torchtitan", "transformers"))
