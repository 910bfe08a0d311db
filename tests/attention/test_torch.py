"""The attention family inside torch: second derivatives, fakes, compile, export, transforms."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass import functional, numerics, reference
from onepass._ops import attention as op
from tests.attention.cases import Case
from tests.support.dtypes import BF16, F16, F32, F64

attend = functional.scaled_dot_product_attention

# ---- derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["query", "slopes"])
def test_second_derivative_of_the_slopes(through):
    """Against the reference's: no difference quotient is taken of float32."""
    case = Case(F64, 3, value_dim=2, batch=2, heads=2, seq_q=4, seq_k=5, alibi="b", sinks=F64,
                window_right=1, dlse=True)  # fmt: skip
    t = case.tensors()

    def second(function, dtype):
        """Of query and slopes, through the gradient of one of them."""
        slopes = t["alibi_slopes"].to(dtype, copy=True).requires_grad_()
        query = t["query"].clone().requires_grad_()
        out, lse = function(query, slopes)
        wrt = dict(query=query, slopes=slopes)
        (first,) = torch.autograd.grad(
            out.pow(2).sum() + lse.sum(), wrt[through], create_graph=True
        )
        return torch.autograd.grad(first.pow(2).sum(), (query, slopes))

    def mine(query, slopes):
        return attend(query, t["key"], t["value"], scale=case.scale, alibi_slopes=slopes,
                      sinks=t["sinks"], window_size=(-1, 1), return_lse=True)  # fmt: skip

    def formula(query, slopes):
        return reference.attention.attention(
            query, t["key"], t["value"], alibi_slopes=slopes, sinks=t["sinks"], window_right=1,
            scale=case.scale,
        )  # fmt: skip

    (dquery, dslopes), ref, base = second(mine, F32), second(formula, F64), second(formula, F32)
    assert (dquery.dtype, dslopes.dtype) == (F64, F32)
    if through == "slopes":
        dquery = dquery.float()  # no more exact than their gradient, which float32 rounds
    numerics.assert_close(dquery, ref[0], base[0])
    numerics.assert_close(dslopes, ref[1], base[1])


def check_second_derivatives(draws: list[Tensor], text: str, tensors: int = 3, **options) -> None:
    """Against torch's unfused function. Linear in the first gradient: in its square a few elements
    would dominate the bound."""

    def second(of, drawn):
        leaves = [t.clone().requires_grad_() for t in drawn[:tensors]]
        loss = of(*leaves * (3 // tensors), **options).pow(2).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(first, leaves, list(drawn[3 : 3 + tensors]))

    runs = []
    for drawn in draws:
        with sdpa_kernel(SDPBackend.MATH):
            ref, base = (second(F.scaled_dot_product_attention, x) for x in (drawn.double(), drawn))
        runs.append((second(attend, drawn), ref, base))
    for index in range(tensors):
        pooled = ([result[index] for result in results] for results in zip(*runs, strict=True))
        numerics.assert_close(*pooled, f"{('query', 'key', 'value')[index]} {text}")


@pytest.mark.parametrize(
    "tensors, dtype",
    [(3, F32), (3, BF16), (3, F16), (3, F64), (1, BF16), (1, F16), (1, F64)],
    ids=str,
)
def test_second_derivatives_of_each_dtype(tensors, dtype):
    """Of three tensors, and of one that is all three. With fewer draws the bias of 16 bits is
    random."""
    draws = [torch.randn(6, 2, 3, 9, 16).to(dtype) for _ in range(32)]
    check_second_derivatives(draws, str(dtype), tensors, is_causal=True)


@pytest.mark.parametrize("gap", [3.0, 8.0, 20.0, 60.0])
def test_second_derivatives_near_certainty(gap):
    """One key's score exceeds all others by `gap`, and its probability is almost 1: derivatives
    are differences of numbers that are almost equal. In float64 the reference has such errors."""
    draws = []
    for _ in range(16):
        drawn = 0.3 * torch.randn(6, 2, 3, 9, 16)
        drawn[0, ..., 0], drawn[1, ..., 0] = gap, 0.0
        drawn[1, :, :, 4, 0] = 1.0  # the key that is certain
        draws.append(drawn)
    check_second_derivatives(draws, f"{gap=}", scale=1.0)


# ---- compile ------------------------------------------------------------------------------------


def test_compile_packed_sequences_of_any_number_and_length():
    def step(x, cu, longest):
        q, k, v = x.unflatten(-1, (3, 2, 8)).unbind(1)
        return functional.varlen_attention(q, k, v, cu, cu, longest, longest, is_causal=True).sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for lengths in ((3, 4), (7, 2), (9, 3, 5)):
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        x = torch.randn(sum(lengths), 48)
        results = []
        for function in (compiled, step):
            leaf = x.clone().requires_grad_()
            results.append(torch.autograd.grad(function(leaf, cu, max(lengths)), leaf)[0])
        torch.testing.assert_close(*results)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


# ---- torch's switches ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["default", "argument", "torch's mode"])
def test_a_backward_is_told_to_be_deterministic(how, monkeypatch):
    """The CPU's always is; CUDA's kernels look at it."""
    told, backward = [], op._backward

    def recorded(*tensors, deterministic, **options):
        told.append(deterministic)
        return backward(*tensors, deterministic=deterministic, **options)

    monkeypatch.setattr(op, "_backward", recorded)
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    packed, ends = x[0].transpose(0, 1), torch.tensor([0, 2, 6], dtype=torch.int32)
    asked = {"deterministic": True} if how == "argument" else {}
    torch.use_deterministic_algorithms(how == "torch's mode")
    try:
        outputs = (
            attend(x, x, x, **asked),
            functional.varlen_attention(packed, packed, packed, ends, ends, 4, 4, **asked),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for output in outputs:  # as it was when the forward ran
        output.sum().backward()
    assert told == [how != "default"] * 2


# ---- TF32 ----------------------------------------------------------------------------------------


def set_of_all(on: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "none"  # as that of all says
    torch.backends.fp32_precision = "tf32" if on else "none"


def set_of_products(on: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


WAYS = {
    "allow_tf32": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "matmul_precision": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "fp32_precision": set_of_products,
    "fp32_precision of all": set_of_all,
}


@pytest.fixture
def torch_precision():
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, bool]]:
    """(name, allow_tf32) of each call of an op."""
    calls = []

    def listened(name):
        run = getattr(op, name)

        def listen(*arguments, **options):
            calls.append((name, options.get("allow_tf32", False)))
            return run(*arguments, **options)

        monkeypatch.setattr(op, name, listen)

    listened("_forward")
    listened("_backward")
    return calls


@pytest.mark.parametrize("way", WAYS)
def test_tf32_is_allowed_where_torch_allows_it(asked, torch_precision, way):
    """For float32 on CUDA."""
    with FakeTensorMode():
        for on in (False, True, False):
            WAYS[way](on)
            for device, dtype in (("cuda", F32), ("cuda", BF16), ("cuda", F64), ("cpu", F32)):
                query = torch.empty(1, 2, 8, 16, device=device, dtype=dtype)
                attend(query, query, query)
                packed = torch.empty(8, 2, 16, device=device, dtype=dtype)
                bounds = torch.empty(2, device=device, dtype=torch.int32)
                functional.varlen_attention(packed, packed, packed, bounds, bounds, 8, 8)
    of_each = [on and case == 0 for on in (False, True, False) for case in range(4)]
    assert asked == [("_forward", on) for on in of_each for _ in range(2)]


def test_a_backward_keeps_to_what_its_forward_was_allowed(monkeypatch, asked):
    """Also if torch's permission has changed since; the CPU's kernels ignore it."""
    allowed = True
    monkeypatch.setattr(op, "_takes_tf32", lambda query: allowed)
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with_tf32 = attend(x, x, x)
    allowed = False
    without = attend(x, x, x)
    (first,) = torch.autograd.grad(without.square().sum(), x)
    allowed = True
    (second,) = torch.autograd.grad(with_tf32.square().sum(), x, create_graph=True)
    assert asked == [("_forward", True), ("_forward", False), ("_backward", False),
                     ("_backward", True)]  # fmt: skip
    assert torch.equal(first, second)
    (third,) = torch.autograd.grad(second.sum(), x)  # by the definition, which has no such option
    assert third.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_follows_torchs_precision(torch_precision, way):
    compiled = torch.compile(lambda: op._tf32_is_allowed(), backend="eager", fullgraph=True)
    for on in (False, True, False):
        WAYS[way](on)
        assert compiled() is on
