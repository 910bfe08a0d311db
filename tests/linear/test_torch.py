"""The linear family inside torch: derivatives, transforms, fakes, compile, export, autocast, the
module, subclasses."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations, prune

import onepass
from onepass import _dispatch_log, functional, numerics
from onepass._policy.precision import HAS_PAIR_PRODUCTS
from tests.linear.cases import DTYPES, FLOATS, backward, layer_gradients, make
from tests.support.dtypes import BF16, F32, F64

# ---- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_gradient_penalty(dtype, bias):
    """A second derivative, of all pairs of tensors, as exact as torch's."""

    def penalty(linear, computed_in):
        draws = []
        for seed in range(3):
            tensors = make(12, 40, 30, dtype, bias=bias, seed=seed).tensors().values()
            leaves = [t.to(computed_in).requires_grad_() for t in tensors]
            gradients = torch.autograd.grad(
                linear(*leaves).sin().sum(), leaves[:2], create_graph=True
            )
            loss = sum(g.pow(2).sum() for g in gradients)
            draws.append(torch.autograd.grad(loss, leaves))
        return zip(*draws, strict=True)

    three = penalty(functional.linear, dtype), penalty(F.linear, F64), penalty(F.linear, dtype)
    for ours, ref, base in zip(*three, strict=True):
        assert ours[0].dtype is dtype
        numerics.assert_close(ours, ref, base)


# ---- autocast ------------------------------------------------------------------------------------


def test_autocast_takes_every_mix_that_torch_takes():
    for mix in itertools.product(DTYPES, repeat=3):
        x, w, b = (torch.randn(s).to(d) for s, d in zip(((2, 8), (4, 8), (4,)), mix, strict=True))
        with torch.autocast("cpu", dtype=BF16):
            try:
                stock = F.linear(x, w, b)
            except RuntimeError:
                with pytest.raises(RuntimeError, match="^linear: "):
                    functional.linear(x, w, b)
                continue
            assert functional.linear(x, w, b).dtype is stock.dtype, mix


def test_a_module_under_autocast_trains():
    """As the function of tensors that were cast before; a residual gives its dtype. Where the CPU
    does not multiply pairs, weights are read as they are."""
    module, x = onepass.nn.Linear(8, 5), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16):
        y = module(x)
        for more in ({}, {"activation": "gelu"}):
            stream = functional.linear(x, module.weight, residual=torch.ones(4, 5), **more)
            assert stream.dtype is F32
    layer = [t.to(BF16 if HAS_PAIR_PRODUCTS else F32) for t in module.parameters()]
    assert torch.equal(y, functional.linear(x.to(BF16), *layer))
    y.sum().backward()
    assert {t.grad.dtype for t in (x, *module.parameters())} == {F32}


# ---- the module ----------------------------------------------------------------------------------


def test_a_module_becomes_ours_by_its_class():
    stock, x = torch.nn.Linear(20, 6), torch.randn(5, 20)
    stock.__class__ = onepass.nn.Linear
    assert torch.equal(stock(x), functional.linear(x, stock.weight, stock.bias))


def test_modules_wrapped_by_torchs_own_tools():
    """Weight norm and pruning replace `weight` by a computed tensor."""
    x = torch.randn(3, 8)
    for wrap in (
        parametrizations.weight_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
    ):
        torch.manual_seed(1)
        ours, stock = wrap(onepass.nn.Linear(8, 5)), torch.nn.Linear(8, 5)
        stock.weight.data, stock.bias.data = ours.weight.detach(), ours.bias.detach()
        torch.testing.assert_close(ours(x), stock(x))
        ours(x).sum().backward()
        assert all(p.grad is not None for p in ours.parameters())


# ---- subclasses of Tensor ------------------------------------------------------------------------


class Noting(torch.Tensor):
    """Records the torch functions that are called on it."""

    met: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.met.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_subclass_goes_to_torchs_own(number):
    tensors = list(make(4, 6, 5).tensors().values())
    expected = F.linear(*tensors)
    tensors[number] = tensors[number].as_subclass(Noting)
    Noting.met.clear()
    found = functional.linear(*tensors)
    assert F.linear in Noting.met and type(found) is Noting
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
    with torch.no_grad():
        assert torch.equal(functional.linear(*tensors, activation="relu"), expected.relu())


def test_explain_says_what_ran():
    case = make(400, 96, 64)
    (call,) = onepass.explain(lambda: functional.linear(**case.tensors())).calls
    assert call["op"] == "linear" and call["kernel"].startswith("linear") and call["reason"]
    weight = case.weight.as_subclass(Noting)
    (call,) = onepass.explain(lambda: functional.linear(case.input, weight)).calls
    assert call["kernel"] == "torch.nn.functional.linear" and "subclass" in call["reason"]
    # Few features are not few rows: the depth of a gradient's product is the number of rows.
    case = make(5000, 40, 8)
    doutput = case.doutput.t().contiguous().t()
    (call,) = onepass.explain(lambda: backward(doutput, case.input, weight_dtype=F32)).calls
    assert call["kernel"] == "linear_kernel"
    # The gradient of a bias has threads of its own, beside a weight that lies transposed.
    case = make(2000, 96, 768)
    case.weight = case.weight.t().contiguous().t()
    torch.set_num_threads(2)
    of_weight, of_bias = onepass.explain(lambda: layer_gradients(case)).calls[1:]
    assert of_weight["op"] == "linear_backward: dweight"
    assert of_bias["op"] == "linear_backward: dbias" and of_bias["threads"] == 2


def test_few_rows_of_any_layout_leave_the_weight_in_place():
    """The rows are copied, which costs little beside reading the weight."""
    case, transposed = make(4, 96, 64), make(4, 96, 64).weight.t().contiguous().t()
    for rows in (case.input, case.input.t().contiguous().t(), case.input[:, :1].expand(4, 96)):
        for weight in (case.weight, transposed):
            (call,) = onepass.explain(lambda rows=rows, w=weight: functional.linear(rows, w)).calls
            assert call["kernel"] == "linear_few_rows_kernel" and "in place" in call["reason"]
    doutput, given = torch.ones(4, 1).expand(4, 64), {"weight": case.weight, "input_dtype": F32}
    (call,) = onepass.explain(lambda: backward(doutput, **given)).calls
    assert call["op"] == "linear_backward: dinput" and call["kernel"] == "linear_few_rows_kernel"


@pytest.mark.parametrize("cls", [torch.nn.Parameter, torch.nn.Buffer])
def test_parameters_are_plain(cls):
    """They are no subclasses of this kind: ours computes."""
    case = make(4, 6, 5)
    expected = functional.linear(**case.tensors())
    case.weight = cls(case.weight)
    (call,) = onepass.explain(lambda: functional.linear(**case.tensors())).calls
    assert call["op"] == "linear" and call["level"] != "torch's own"
    assert torch.equal(functional.linear(**case.tensors()), expected)


# ---- torch.func ----------------------------------------------------------------------------------


def test_samples_are_rows_of_one_product():
    """If the weight is shared, with the same bits. Otherwise each sample is a call."""
    x, w, b = torch.randn(6, 9, 20, requires_grad=True), torch.randn(16, 20), torch.randn(16)
    residual = torch.randn(9, 6, 16)
    epilogue = {"activation": "silu"}

    def calls_of(function) -> int:
        with _dispatch_log.record() as calls:
            function()
        return len(calls)

    def both(x, r=None):
        return functional.linear(x, w, b, residual=r, **epilogue)

    for mapped, whole in (
        (lambda: torch.vmap(functional.linear, (0, None, None))(x, w, b),
         lambda: functional.linear(x, w, b)),
        (lambda: torch.vmap(both, (1, 0), 1)(x, residual),
         lambda: both(x, residual.transpose(0, 1))),
        (lambda: torch.vmap(lambda x: both(x, residual[:, 0]))(x),
         lambda: both(x, residual[:, 0].expand(6, 9, 16))),
        (lambda: torch.vmap(torch.vmap(both))(x), lambda: both(x)),
        (lambda: torch.autograd.grad(torch.vmap(both)(x).sum(), x)[0],
         lambda: torch.autograd.grad(both(x).sum(), x)[0]),
    ):  # fmt: skip
        assert torch.equal(mapped(), whole()) and calls_of(mapped) == calls_of(whole)
    assert calls_of(lambda: torch.vmap(functional.linear)(x, w.expand(6, 16, 20))) == 6
    dropped = torch.vmap(
        lambda x: functional.linear(x, w, dropout_p=0.5), randomness="same"
    )(x.detach().abs() + 1)  # fmt: skip
    assert all(torch.equal(one == 0, dropped[0] == 0) for one in dropped)
