"""Packages of AOTInductor and compiled autograd, of swapped models; names in a profile."""

import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import onepass
from onepass import _library
from tests.support import compiled

HERE = Path(__file__).parent
PROGRAM = HERE / "aoti_program.cpp"


class Block(nn.Module):
    """Layer norm, attention, RMS norm and dropout, under names that swap finds."""

    def __init__(self, p=0.0):
        super().__init__()
        self.norm, self.rms, self.drop = nn.LayerNorm(64), nn.RMSNorm(64), nn.Dropout(p)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        batch, seq, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, seq, 3, 4, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        p = self.drop.p if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=p, is_causal=True
        )
        return self.rms(x + self.drop(self.out(y.transpose(1, 2).reshape(batch, seq, 64))))


def swapped(p=0.0):
    torch.manual_seed(0)
    model = Block(p)
    assert {entry["kind"] for entry in onepass.swap(model).swapped} >= {"norm", "attention"}
    return model


def data(rows=48):
    return torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """(model, file of its package), for any batch and length."""
    model, sizes = swapped().eval(), (torch.export.Dim("batch"), torch.export.Dim("seq"))
    with torch.no_grad():
        program = torch.export.export(
            model, (data(),), dynamic_shapes={"x": dict(enumerate(sizes))}
        )
        file = tmp_path_factory.mktemp("aoti") / "model.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    return model, file


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_package_runs_in_python(package):
    model, file = package
    loaded = torch._inductor.aoti_load_package(str(file))
    for rows in (48, 17):
        with torch.no_grad():
            # inductor computes products and the code between operators, and sums in its own order.
            assert (loaded(data(rows)) - model(data(rows))).abs().max() < 1e-5
            with torch.profiler.profile() as profile:
                loaded(data(rows))
        names = {event.key for event in profile.key_averages()}
        assert {"onepass::norm_forward", "onepass::attention_forward"} <= names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_package_runs_in_a_program_without_python(package, tmp_path):
    """That program links against torch, and loads our CPU library for the operators."""
    model, file = package
    torch_folder = Path(torch.__file__).parent
    include, libraries = torch_folder / "include", torch_folder / "lib"
    abi = int(torch.compiled_with_cxx11_abi())
    command = (
        "g++", "-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", include,
        "-isystem", include / "torch/csrc/api/include", PROGRAM, f"-L{libraries}",
        f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl",
    )  # fmt: skip
    (program,) = compiled.made([compiled.Recipe("aoti_program", command, (PROGRAM,))])
    given, taken = tmp_path / "input", tmp_path / "output"
    given.write_bytes(data(33).numpy().tobytes())
    library = _library.library_directory() / "libonepass_cpu.so"
    done = subprocess.run(
        [program, library, file, given, taken, "33"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = torch.from_numpy(numpy.fromfile(taken, dtype=numpy.float32)).view(2, 33, 64)
    with torch.no_grad():
        assert (found - model(data(33))).abs().max() < 1e-5
    # Without our library the operators do not exist.
    other = next(libraries.glob("libc10.so*"))
    done = subprocess.run(
        [program, other, file, given, taken, "33"], capture_output=True, text=True
    )
    assert done.returncode not in (0, 2, 3) and "onepass" in done.stderr


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param("aot_eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_autograd(backend):
    """The backward, compiled when it runs, drops the same elements as the forward."""
    model, x = swapped(0.2), data()

    def gradients(backward):
        torch.manual_seed(3)
        loss = model(x).square().sum()
        backward(loss)
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    def compiled_backward(loss):
        compiler = torch.compile(backend=backend)
        with torch._dynamo.compiled_autograd._enable(compiler):
            loss.backward()

    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    expected, found = gradients(lambda loss: loss.backward()), gradients(compiled_backward)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == before + 1
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() <= 1e-5 * two.abs().max() + 1e-9


def test_a_profile_names_operators_forward_and_backward():
    model = swapped(0.2)
    with torch.profiler.profile() as profile:
        model(data()).square().sum().backward()
    names = {event.key for event in profile.key_averages()}
    ways = [f"onepass::{f}_{way}" for f in ("norm", "attention") for way in ("forward", "backward")]
    assert {*ways, "onepass::dropout_forward"} <= names
