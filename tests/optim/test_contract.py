"""The optimizers on the CPU: layouts, contract, extremes."""

import itertools
import math

import pytest
import torch

from onepass import _dispatch_log
from tests.optim.cases import (
    ALL,
    DETERMINISTIC,
    FLAGS,
    MODES,
    NAMES,
    RUNS,
    all_names,
    assert_same,
    bits,
    built,
    first_moment,
    give_gradients,
    like,
    made,
    members,
    modes,
    names,
    options_of,
    ours,
    runs,
    same,
    snapshot,
    steps,
    stock,
    torch_names,
    unchanged,
    without_gradients,
)
from tests.support.dtypes import BF16, F16, F32

# ---- layouts -------------------------------------------------------------------------------------


def gapped(values):
    """(the same values with other elements between them, those elements)."""
    whole = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0).to(values.dtype)
    whole[..., ::2] = values
    return whole[..., ::2], whole[..., 1::2]


def permuted(values):
    return values.transpose(0, -1).contiguous().transpose(0, -1)


LAYOUTS = {
    "contiguous": lambda values: values.clone(),
    "transposed": permuted,
    "channels last": lambda values: values.clone(
        memory_format=torch.channels_last if values.dim() == 4 else torch.preserve_format
    ),
    "gaps": lambda values: gapped(values)[0],
    "offset": lambda values: torch.cat([values.new_zeros(3), values.flatten()])[3:].view_as(values),
}


def negative(values):
    return torch._neg_view(-values)


EXACT_RUNS = [
    run for run in RUNS if run[1] in DETERMINISTIC or run == ("Muon", "remainder16, bfloat16")
]


@pytest.mark.isa
@pytest.mark.parametrize("name, mode", EXACT_RUNS)
def test_layouts(mode, name):
    """Bitwise the steps of contiguous tensors, for every pair of layouts."""
    of_gradients = LAYOUTS | {"negative": negative}
    has_sums = name in ("Adafactor", "LAMB")  # over a tensor, in the order of memory
    for shape in ((6, 5), (70, 130), (2, 3, 4, 5), (4, 1, 40))[: 2 if name == "Muon" else 4]:
        starts = torch.randn(shape).bfloat16()
        gradients = [torch.randn(shape).bfloat16() for _ in range(2)]
        if has_sums:
            starts, gradients = starts.float(), [gradient.float() for gradient in gradients]
        pairs = list(itertools.product(LAYOUTS, of_gradients))
        results = {}
        for pair in pairs if shape == (6, 5) else pairs[::5]:
            p = torch.nn.Parameter(LAYOUTS[pair[0]](starts))
            strides = p.stride()
            averages = {} if shape == (6, 5) else {"ema_decay": 0.9}
            optimizer = built(name, [p], **{**options_of(name, mode), **averages})
            for gradient in gradients:
                p.grad = of_gradients[pair[1]](gradient)
                optimizer.step()
            assert p.stride() == strides
            results[pair] = without_gradients(optimizer)
        expected = results["contiguous", "contiguous"]
        for pair, found in results.items():
            if has_sums:
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
            else:
                assert_same(found, expected, f"{shape} {pair}")


@runs
def test_what_lies_around_and_between_stays(mode, name):
    memory = torch.full((5000,), 0.75).bfloat16()
    p = torch.nn.Parameter(memory[3:4355].view(64, 68))
    column, between = gapped(torch.randn(30, 20).bfloat16())
    p.grad, gradient_between = gapped(torch.randn(64, 68).bfloat16())
    second = torch.nn.Parameter(column)
    second.grad = torch.randn(30, 20).bfloat16()
    built(name, [p, second], **options_of(name, mode)).step()
    assert (memory[3:4355] != 0.75).any()
    assert (memory[:3] == 0.75).all() and (memory[4355:] == 0.75).all()
    assert (between == 7).all() and (gradient_between == 7).all()


@pytest.mark.isa
@names
@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_sizes(mode, name):
    """A tensor of any size is stepped, bit for bit, as the first elements of a long tensor."""
    sizes = [*range(1, 35), 255, 256, 257, 511, 513, 4095, 4096, 4097, 8191, 8192, 8193]
    start = torch.randn(8193).bfloat16()
    gradients = [torch.randn(8193).bfloat16() for _ in range(2)]
    params = [torch.nn.Parameter(start[:size].clone()) for size in sizes]
    optimizer = ours(name)(params, **FLAGS[name], **MODES[mode])
    for gradient in gradients:
        for p in params:
            p.grad = gradient[: p.numel()].clone()
        optimizer.step()
    found = snapshot(optimizer)
    for (index, key), value in found.items():
        expected = found[len(sizes) - 1, key]
        expected = expected if key == "step" else expected[: sizes[index]]
        assert same(value, expected), f"{sizes[index]}, {key}"


@runs
def test_empty_and_single_elements(mode, name):
    shapes = ((1, 1), (0, 3), (3, 0)) if name == "Muon" else ((), (1,), (5,), (0,), (3, 0))
    optimizer = steps(made(name, shapes, BF16, **options_of(name, mode)), 2)
    for p, entry in zip(members(optimizer), optimizer.state_dict()["state"].values(), strict=True):
        assert p.shape in shapes and p.isfinite().all()
        for key in {first_moment(name), "exp_avg_sq", "master"} & set(entry):
            assert entry[key].shape == p.shape, key
    nothing = steps(made(name, shapes[-2:], BF16, **options_of(name, mode)), 2)
    assert all(p.numel() == 0 for p in members(nothing))


SHARING = {
    "whole and part": lambda memory: (memory, memory[100:]),
    "the same": lambda memory: (memory[:5000], memory[:5000]),
    "transposed": lambda memory: (memory.view(100, 200), memory.view(100, 200).t()),
    "the same, with gaps": lambda memory: (memory[::2], memory[::2]),
    "over one another's gaps": lambda memory: (memory[::2], memory[1000:]),
}


def is_made(optimizer):
    """Whether the step was made; one that is refused changes nothing."""
    before = snapshot(optimizer)
    try:
        optimizer.step()
    except (RuntimeError, ValueError):
        after = snapshot(optimizer)
        assert_same({key: after[key] for key in before}, before)
        return False
    return True


@names
@pytest.mark.parametrize("later", [False, True], ids=["from the start", "in mid-training"])
@pytest.mark.parametrize("how", SHARING)
def test_parameters_that_share_elements_are_right_or_refused(how, later, name):
    """torch steps one after the other."""
    results = []
    for cls in (ours(name), stock(name)):
        torch.manual_seed(1)
        memory = torch.randn(20_000)
        params = [torch.nn.Parameter(part) for part in SHARING[how](memory)]
        if later:
            shared, params[1].data = params[1].data, params[1].data.clone()
        optimizer = cls(params, **FLAGS[name])
        if later:
            steps(optimizer, 1)
            params[1].data = shared
        give_gradients(optimizer, 1)
        if not is_made(optimizer):
            assert cls is ours(name)
            return
        results.append(memory)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@names
@pytest.mark.parametrize("zero_grads", [False, True])
@pytest.mark.parametrize("kind", ["of two parameters", "of all elements"])
def test_gradients_that_share_elements_are_right_or_refused(kind, zero_grads, name):
    optimizer = made(name, ((9000,), (9000,)), zero_grads=zero_grads)
    apart = made(name, ((9000,), (9000,)))
    gradient = torch.randn(9000) if kind == "of two parameters" else torch.randn(1).expand(9000)
    for p, q in zip(members(optimizer), members(apart), strict=True):
        p.grad, q.grad = gradient, gradient.clone()
    apart.step()
    if not is_made(optimizer):
        assert zero_grads
        return
    assert_same(without_gradients(optimizer), without_gradients(apart))
    assert not zero_grads or not any(p.grad.any() for p in members(optimizer))


# ---- contract ------------------------------------------------------------------------------------


@pytest.mark.isa
@pytest.mark.grid
@names
@modes
def test_bitwise_equal_for_any_number_of_threads(mode, name):
    sizes = [(), 5, 4096, 4097, 4352, *[300] * 40, 20_001]
    results = {}
    for threads in (1, 5):
        torch.set_num_threads(threads)
        for dtype in (BF16, F32):
            optimizer = made(name, sizes, dtype, **MODES[mode])
            results[threads, dtype] = snapshot(steps(optimizer, 2))
    for (threads, dtype), found in results.items():
        assert_same(found, results[1, dtype], f"{threads} threads, {dtype}")


def make_sparse(optimizer, p):
    p.grad = torch.ones(p.shape).to_sparse()
    return "does not support sparse gradients"


def make_overlap(optimizer, p):
    p.data = torch.ones(1).expand(p.shape)
    return "single memory location|overlap|share"


def make_shared(optimizer, p):
    """With another one, in one element."""
    other = members(optimizer)[1]
    memory = torch.ones(p.numel() + other.numel() - 1)
    p.data = memory[: p.numel()].view(p.shape)
    other.data = memory[p.numel() - 1 :].view(other.shape)
    return "params must not share memory"


def make_larger(optimizer, p):
    """As in torch: the states do not fit."""
    p.data = torch.ones(9, *p.shape[1:])
    p.grad = torch.ones_like(p)
    return "of (a )?parameter.* must have shape"


def make_state(change, message, in_place=False):
    """A change of the first state with more elements than a count, or of its memory."""

    def spoil(optimizer, p):
        entry = optimizer.state[p]
        key = next(key for key in entry if key != "step")
        if in_place:
            entry[key].data = change(entry[key])
        else:
            entry[key] = change(entry[key])
        return message.format(key)

    return spoil


def zeros(size):
    return lambda _: torch.zeros(size)


SPOILS = {  # and of which optimizers
    "sparse": (make_sparse, ALL),
    "overlap": (make_overlap, ALL),
    "shared": (make_shared, (*NAMES, "Muon", "MuonWithAdamW")),
    "larger": (make_larger, NAMES),
    "another shape": (make_state(zeros(3), "{} of (a )?parameter"), ALL),
    "another dtype": (make_state(torch.Tensor.long, "{}"), ALL),
    "another memory": (make_state(zeros(7), "{} of parameter 2 must have shape", True), NAMES),
    "wider memory": (make_state(torch.Tensor.double, "{} of .* 2 must have dtype", True), NAMES),
}


@pytest.mark.parametrize(
    "spoil, name", [(spoil, name) for spoil, (_, names) in SPOILS.items() for name in names]
)
def test_what_does_not_fit_is_refused_before_anything_is_written(spoil, name):
    first = spoil in ("sparse", "overlap", "shared")
    for taken in (0, 2) if first else (2,):
        for extras in ({}, {"max_grad_norm": 1.0}) if spoil == "sparse" else ({},):
            optimizer = steps(like(name, dtype=F32, **extras), taken)
            give_gradients(optimizer, 99)
            message = SPOILS[spoil][0](optimizer, members(optimizer)[2])
            errors = (RuntimeError, ValueError, TypeError) if "dtype" in spoil else RuntimeError
            with unchanged(optimizer), pytest.raises(errors, match=message):
                optimizer.step()


@all_names
def test_a_closure_that_raises_leaves_all_as_it_was(name):
    def closure():
        raise KeyError("closure")

    optimizer = steps(like(name), 2)
    with unchanged(optimizer), pytest.raises(KeyError):
        optimizer.step(closure)


@all_names
def test_complex_parameters_are_refused(name):
    p = torch.zeros(5, 5, dtype=torch.complex64, requires_grad=True)
    p.grad = torch.ones(5, 5, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="complex"):
        built(name, [p]).step()
    assert (p == 0).all()


ERRORS = {
    "{name}: master must .*, got 'fp16'": {"master": "fp16"},
    "{name}: master must .*, got True": {"master": True},
    "{name}: state_dtype must .*, got 'int4'": {"state_dtype": "int4"},
    "{name}: state_dtype must .*, got \\['int8'\\]": {"state_dtype": ["int8"]},
    "ema_decay must be from 0 to 1, got 1.5": {"ema_decay": 1.5},
    "ema_decay must be from 0 to 1, got nan": {"ema_decay": math.nan},
    "ema_decay must be a number, a function of the step or": {"ema_decay": "0.9"},
    "ema_decay must .* got bool": {"ema_decay": True},
    "ema_dtype must be None, torch.float": {"ema_decay": 0.9, "ema_dtype": BF16},
    "ema_dtype must be None without ema_decay": {"ema_dtype": "param"},
    "Invalid learning rate: -1": {"lr": -1.0},
    "Invalid weight_decay value: -1": {"weight_decay": -1.0},
}
OF_TORCH = {
    "`fused` and `foreach` cannot be `True` together": {"fused": True, "foreach": True},
    "differentiable": {"differentiable": True},
    "`fused` does not support `differentiable`": {"differentiable": True, "fused": True},
}
OWN_ERRORS = {
    **dict.fromkeys(("AdamW", "Adam", "SGD"), OF_TORCH),
    "Lion": {
        "`fused` and `foreach` cannot be `True` together": {"fused": True, "foreach": True},
        "Invalid beta parameter at index 0": {"betas": (1.0, 0.9)},
        "Invalid beta parameter at index 1": {"betas": (0.9, -0.1)},
    },
    "LAMB": {
        "Invalid beta parameter at index 1: 1.0": {"betas": (0.9, 1.0)},
        "betas must be two numbers": {"betas": (0.9,)},
        "Invalid epsilon value: -1.0": {"eps": -1.0},
        "Tensor lr must be 1-element": {"lr": torch.ones(2)},
    },
}


@pytest.mark.parametrize("name", OWN_ERRORS)
def test_constructor_errors(name):
    p = torch.zeros(5, requires_grad=True)
    for message, wrong in {**ERRORS, **OWN_ERRORS[name]}.items():
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message.format(name=name)):
            ours(name)([p], **wrong)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_capturable_is_refused_on_the_cpu(name):
    p = torch.ones(5, requires_grad=True)
    p.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match="capturable"):
        ours(name)([p], capturable=True).step()
    assert (p == 1).all()


@names
def test_remainders_are_for_bfloat16(name):
    half = torch.zeros(5, dtype=F16, requires_grad=True)
    with pytest.raises(ValueError, match="remainder16"):
        ours(name)([half], master="remainder16")
    optimizer = ours(name)([torch.zeros(5, requires_grad=True)], master="remainder16")
    with pytest.raises(ValueError, match="remainder16"):
        optimizer.add_param_group({"params": [half]})
    assert len(optimizer.param_groups) == 1


@names
@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_flags_that_choose_torchs_implementation_are_logged(flag, name, monkeypatch, caplog):
    monkeypatch.setattr(_dispatch_log, "_enabled", True)
    monkeypatch.setattr(_dispatch_log.logger, "propagate", True)
    with caplog.at_level("INFO", logger=_dispatch_log.logger.name):
        optimizer = made(name, (5,), **{flag: True})
    assert flag in caplog.text
    assert optimizer.param_groups[0][flag] is True
    plain = snapshot(steps(made(name, (5, 4096)), 3))
    assert_same(snapshot(steps(made(name, (5, 4096), **{flag: True}), 3)), plain)


@names
def test_a_step_marks_its_parameters_as_changed(name):
    """So autograd refuses a backward through values that were overwritten."""
    p = torch.ones(5, requires_grad=True)
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    version = p._version
    ours(name)([p]).step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- extremes ------------------------------------------------------------------------------------


@pytest.mark.isa
@torch_names
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_not_finite_and_far_out_as_torch(dtype, name):
    """Infinities and NaNs are where torch has them; the rest by the rule, per magnitude."""
    special = [math.inf, -math.inf, math.nan, 3e38, -3e38, 1e20, 1e-20, 1e-38, 1e-42, 0.0, -0.0]
    gradient = torch.tensor(special).repeat(20)[:211].to(dtype)
    for number in (1, 2):
        results = []
        for cls, working in ((ours(name), dtype), (stock(name), F32)):
            p = torch.full((211,), 0.5, dtype=working, requires_grad=True)
            optimizer = cls([p], **{**FLAGS[name], "weight_decay": 0.0})
            for _ in range(number):
                p.grad = gradient.to(working)
                optimizer.step()
            results.append({"param": p.detach(), **optimizer.state_dict()["state"][0]})
        found, expected = results
        for key in found.keys() - {"step"}:
            one, two = found[key], expected[key].to(dtype)
            assert torch.equal(one.isnan(), two.isnan()), f"{key} after {number}"
            assert torch.equal(one.isinf(), two.isinf()), f"{key} after {number}"
            finite = two.isfinite()
            tolerance = 4 * torch.finfo(dtype).eps
            tiny = torch.finfo(F32).smallest_normal
            torch.testing.assert_close(one[finite], two[finite], rtol=tolerance, atol=tiny)


@torch_names
def test_settings_at_their_ends_as_torch(name):
    """No averaging, no epsilon: 0 / 0 where there is no gradient, as in torch."""
    flags = {"betas": (0.0, 0.0), "eps": 0.0} if name != "SGD" else {"momentum": 1.0}
    results = []
    for cls in (ours(name), stock(name)):
        p = torch.ones(300, requires_grad=True)
        optimizer = cls([p], lr=0.1, weight_decay=0.0, **flags)
        for number in range(3):
            p.grad = torch.linspace(-1, 1, 300) * (number + 1)
            p.grad[::3] = 0.0
            optimizer.step()
        results.append(p.detach())
    assert results[0].isnan().any() == (name != "SGD")
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.isa
@names
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "all"])  # which skips the step
@pytest.mark.grid(2)
def test_one_bad_element_spoils_no_other(mode, name):
    """Codes of a block share a scale: there only other blocks stay correct."""
    good = made(name, (100, 4352), BF16, **MODES[mode])
    bad = made(name, (100, 4352), BF16, **MODES[mode])
    steps(good, 2)
    for number in range(2):
        give_gradients(bad, number)
        members(bad)[1].grad[300] = math.nan
        bad.step()
    for one, two in zip(members(good), members(bad), strict=True):
        differ = (bits(one) != bits(two)).nonzero().flatten().tolist()
        allowed = range(256, 512) if "int8" in mode else [300]
        assert set(differ) <= set(allowed)
    for value in (members(bad)[1], bad.state_dict()["state"][1][first_moment(name)]):
        assert value[300].isnan()
