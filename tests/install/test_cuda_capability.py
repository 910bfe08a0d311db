"""CUDA devices that are too old for the kernels are refused by name, wherever one is used."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onepass
from onepass import _library, cli
from tests.emulator import emulated

ROOT = Path(__file__).resolve().parents[2]

# The call path of every operator, on devices whose number is their capability.
CALLS = r"""
#include <iostream>

#include "ops/runtime.h"

namespace onepass {
int32_t capability_of(const Device& device) { return device.index; }
Machine machine() { return {.threads = 1}; }
std::ostream& operator<<(std::ostream& text, const Device&) { return text << "cuda:0"; }
}  // namespace onepass

int main() {
  struct Args {};
  const onepass::Operator<Args> op{
      .plan = [](const Args&, const onepass::Machine&) -> onepass::Plan {
        throw std::runtime_error("planned");
      },
      .run = nullptr};
  for (const int capability : {52, 75, 80, 120}) {
    try {
      onepass::run_operator(op, Args{}, {.type = 1, .index = capability}, [] {
        return onepass::Dispatch{.op = "attention", .arguments = ""};
      });
    } catch (const std::runtime_error& error) {
      std::cout << error.what() << "\n";
    }
  }
}
"""


def test_an_operator_names_the_device(tmp_path):
    if emulated.COMPILER is None:
        pytest.skip("there is no C++ compiler")
    source, program = tmp_path / "calls.cpp", tmp_path / "calls"
    source.write_text(CALLS)
    headers = Path(torch.__file__).parent / "include"
    words = [emulated.COMPILER, "-std=c++20", f"-I{ROOT / 'csrc'}", "-isystem", headers]
    words += ["-DTORCH_TARGET_VERSION=0x020a000000000000", source, "-o", program, "-no-pie"]
    words += ["-Wl,--unresolved-symbols=ignore-all,-z,lazy"]  # unused symbols
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    message = "attention: tensors must be on a CUDA device of compute capability 8.0 or newer, got "
    assert printed.splitlines() == [
        f"{message}cuda:0, which has 5.2", f"{message}cuda:0, which has 7.5", "planned", "planned"
    ]  # fmt: skip


@pytest.fixture
def turing(monkeypatch):
    """Pretends that torch's CUDA device has capability 7.5, and this build has newer kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(_library, "not_loaded", {})


REASON = "the device has compute capability 7.5, and onepass needs 8.0 or newer"


def test_commands_refuse_it(turing, capsys, monkeypatch):
    assert _library.no_cuda() == REASON
    for command in ("bench", "compare"):
        assert cli.main([command, "--device", "cuda"]) == 2
        assert capsys.readouterr().err.strip().endswith(REASON)
    for newer in ((8, 0), (8, 9), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: newer)
        assert _library.no_cuda() == ""


def test_modules_on_it_are_not_swapped(turing, monkeypatch):
    monkeypatch.setattr("onepass.swapping.matchers.has_kernels", lambda device, kind: True)
    model = nn.Sequential(nn.LayerNorm(8), nn.MultiheadAttention(8, 2))
    on_it = SimpleNamespace(device=torch.device("cuda", 0))
    for module in model:
        monkeypatch.setattr(module, "parameters", lambda: [on_it])
    report = onepass.swap(model, dry_run=True)
    assert [entry["reason"] for entry in report.skipped] == [REASON] * 2 and not report.swapped
