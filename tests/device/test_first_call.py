"""The first call of a process, on a CUDA device, while a graph is captured.

Before it, nothing of onepass is loaded there: a kernel is loaded at its first launch, and its limit
of shared memory is set then. Both must be legal in a capture.
"""

import os
import subprocess
import sys

import pytest

from tests.device.common import needs_device

pytestmark = needs_device

PROGRAM = """
import os
import torch
from onepass import functional

device = torch.device(os.environ.get("ONEPASS_TEST_DEVICE", "cuda"))

def drawn(*size, dtype=torch.bfloat16):
    return torch.randn(*size, dtype=dtype, device=device)

inputs, run = {CALL}
leaves = [x.requires_grad_() for x in inputs]

def call():
    output = run(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))

if device.type == "cuda":
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
else:
    found = call()
for one, other in zip(found, call(), strict=True):
    assert one.isfinite().all() and torch.equal(one, other)
"""
CALLS = {
    "norm": "[drawn(64, 1000)], lambda x: functional.layer_norm(x, (1000,))",
    "long norm": "[drawn(4, 20000)], lambda x: functional.rms_norm(x, (20000,))",
    "gate": "[drawn(64, 1000), drawn(64, 1000)], functional.gated_activation",
    "attention": (  # of more shared memory than is a block's without asking
        "[drawn(2, 4, 300, 128) for _ in range(3)], "
        "lambda *qkv: functional.scaled_dot_product_attention(*qkv, deterministic=True)"
    ),
    "attention in float32": (
        "[drawn(2, 4, 300, 64, dtype=torch.float32) for _ in range(3)], "
        "lambda *qkv: functional.scaled_dot_product_attention(*qkv, deterministic=True)"
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_first_call_in_a_capture(call):
    words = [sys.executable, "-c", PROGRAM.replace("{CALL}", call)]
    environment = os.environ | {"CUDA_MODULE_LOADING": "LAZY"}
    result = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
