"""The precision of the optimizers in 16 and 8 bits.

Random rounding is held to normal deviates of at most Z: a right implementation fails one such
check in 5e8 draws of seeds; there are about 300 of them, so the file fails by chance for one seed
in a million, and the seeds are fixed.
"""

import math
import warnings

import pytest
import torch

import onepass
from tests.optim.cases import (
    FLAGS,
    MODES,
    SHAPES,
    assert_same,
    bits,
    first_moment,
    made,
    members,
    names,
    ours,
    same,
    snapshot,
    steps,
)
from tests.support.dtypes import BF16, F16, F32, F64

Z = 6.0
ELEMENTS = 1 << 16
BLOCK = 256


def deviates(count, trials, probability):
    """How many standard deviations a binomial count is from its mean."""
    spread = math.sqrt(trials * probability * (1 - probability))
    return abs(float(count) - trials * probability) / spread


# ---- remainder16 is fp32 -------------------------------------------------------------------------


@pytest.mark.isa
@pytest.mark.grid(2)
@names
@pytest.mark.parametrize("state_dtype", [None, F32, BF16, "int8"], ids=str)
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_remainder16_is_bitwise_fp32(maximize, state_dtype, name):
    results = []
    for master in ("fp32", "remainder16"):
        torch.manual_seed(8)
        options = dict(master=master, state_dtype=state_dtype, maximize=maximize)
        optimizer = made(name, (*SHAPES, (60_001,)), BF16, **options)
        with torch.no_grad():  # zeros of both signs, subnormal and large numbers
            members(optimizer)[3].fill_(-0.0)
            members(optimizer)[1][:1000] *= 2.0 ** torch.arange(-120, 120).repeat(5)[:1000]
            members(optimizer)[1][1000:1100] = 0.0
        results.append(snapshot(steps(optimizer, 25)))
    assert_same(*results)
    masters = results[0][4, "master"]
    assert (bits(masters) & 0xFFFF).float().std() > 0.9 * 65536 / math.sqrt(12)


@pytest.mark.isa
@pytest.mark.parametrize("master", ["fp32", "remainder16"])
def test_ties_go_away_from_zero(master):
    """1 and 1 + 2^-7 are neighbours in bfloat16; with ties to even the middle would become 1."""
    sign = torch.tensor([1.0, -1.0] * 20)
    p = sign.bfloat16().requires_grad_()
    optimizer = onepass.optim.SGD([p], lr=1.0, master=master)
    p.grad = (-sign * 2**-8).bfloat16()
    optimizer.step()
    assert torch.equal(p.detach().float(), sign * (1 + 2**-7))
    p.grad = (sign * 2**-16).bfloat16()
    optimizer.step()
    assert torch.equal(p.detach().float(), sign)


# ---- stochastic rounding -------------------------------------------------------------------------

NEXT = {BF16: 2**-7, F16: 2**-10}  # from 1 to the next number


def raised(fraction, dtype=BF16, seed=0, count=1, sign=1.0, params=1):
    """Which of ELEMENTS ones were rounded up when a step adds `fraction` of the distance to the
    next number: (count, params, ELEMENTS)."""
    torch.manual_seed(seed)
    made_of = [torch.ones(ELEMENTS, dtype=dtype).requires_grad_() for _ in range(params)]
    optimizer = onepass.optim.SGD(made_of, lr=1.0, master="stochastic")
    found = []
    for _ in range(count):
        for p in made_of:
            with torch.no_grad():
                p.fill_(sign)
            p.grad = torch.full_like(p, -sign * fraction * NEXT[dtype])
            assert p.grad[0] == -sign * fraction * NEXT[dtype]
        optimizer.step()
        after = [p.detach().float() * sign for p in made_of]
        for values in after:
            assert ((values == 1) | (values == 1 + NEXT[dtype])).all()
        found.append(torch.stack([values > 1 for values in after]))
    return torch.stack(found)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_is_unbiased(sign, dtype):
    for fraction in (1 / 256, 1 / 16, 0.3125, 0.5, 0.6875, 255 / 256):
        for one in raised(fraction, dtype, count=3, sign=sign):
            assert deviates(one.sum(), ELEMENTS, fraction) < Z, fraction
    assert not raised(0.0, dtype, count=3, sign=sign).any()


@pytest.mark.isa
@names
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_stochastic_rounding_of_any_step_is_unbiased(dtype, name):
    """Errors in distances of neighbours: below one, of mean zero whatever the value's magnitude."""
    start = (torch.randn(ELEMENTS).sign() * (0.1 + torch.rand(ELEMENTS))).to(dtype)
    gradient = torch.randn(ELEMENTS).to(dtype)
    results = []
    for working, extras in ((dtype, {"master": "stochastic", "state_dtype": F32}), (F32, {})):
        p = start.clone().to(working).requires_grad_()
        p.grad = gradient.to(working)
        ours(name)([p], **FLAGS[name], **extras).step()
        results.append(p.detach().double())
    found, exact = results
    _, exponent = torch.frexp(exact)
    distance = torch.finfo(dtype).eps * torch.ldexp(torch.ones_like(exact), exponent - 1)
    error = (found - exact) / distance
    assert error.abs().max() < 1
    moved = error != 0
    assert moved.float().mean() > 0.9
    for part in (error[exact > 0], error[exact < 0], error[exact.abs() < 0.5]):
        assert abs(part.mean()) < Z * part.std() / math.sqrt(part.numel())


def test_stochastic_rounding_is_reproducible():
    assert torch.equal(raised(0.5, seed=3, count=2), raised(0.5, seed=3, count=2))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    optimizer = made("AdamW", SHAPES, BF16, master="stochastic", state_dtype="int8")
    steps(optimizer, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.isa
@pytest.mark.parametrize("fraction", [0.5, 1 / 16])
def test_rounding_differs_by_step_parameter_element_and_seed(fraction):
    """Pairs of decisions are both upward as often as independent ones."""
    found = raised(fraction, count=6, params=4)
    pairs = {}
    for lag in (1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 256, 4096, 8192):
        pairs[f"elements {lag} apart"] = (found[0, 0][lag:], found[0, 0][:-lag])
    for one in range(6):
        for two in range(one):
            pairs[f"steps {two} and {one}"] = (found[one, 0], found[two, 0])
    for one in range(4):
        for two in range(one):
            pairs[f"parameters {two} and {one}"] = (found[0, one], found[0, two])
    pairs["step 0 of parameter 1, step 1 of parameter 0"] = (found[0, 1], found[1, 0])
    for seed in (1, 2, 1 << 16, 1 << 31):
        pairs[f"seeds 0 and {seed}"] = (found[0, 0], raised(fraction, seed=seed)[0, 0])
    for case, (one, two) in pairs.items():
        both = (one & two).sum()
        assert deviates(both, one.numel(), fraction**2) < Z, case


@pytest.mark.isa
@names
@pytest.mark.parametrize("master", ["fp32", "remainder16", "stochastic"])
def test_what_is_not_finite_stays(master, name):
    special = torch.tensor([math.inf, -math.inf, math.nan, 3.38e38, 0.0, -0.0, 1.0] * 100)
    for dtype in (BF16, F16) if master != "remainder16" else (BF16,):
        p = special.to(dtype).requires_grad_()
        optimizer = ours(name)([p], lr=0.0, weight_decay=0.0, master=master)
        p.grad = torch.ones(700, dtype=dtype)
        optimizer.step()
        found, expected = p.detach().float(), special.to(dtype).float()
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


# Less than a vector of elements, and pairs of vectors with a tail.
counts = pytest.mark.parametrize("count", [7, 200])


@pytest.mark.isa
def test_a_parameter_and_its_second_moment_are_rounded_independently():
    """Both lie half way between two numbers after the step."""
    step, kept = NEXT[BF16] / 4, 0.25 * (1 + NEXT[BF16] / 2)
    p = torch.ones(ELEMENTS, dtype=BF16).requires_grad_()
    p.grad = torch.ones_like(p)
    rates = dict(lr=step, betas=(0.0, 1 - kept), eps=0.0, weight_decay=0.0)
    optimizer = onepass.optim.AdamW([p], **rates, master="stochastic", state_dtype=BF16)
    optimizer.step()
    second = optimizer.state[p]["exp_avg_sq"]
    raised_param, raised_moment = p.detach().float() > 1 - step, second.float() > kept
    for count in (raised_param.sum(), raised_moment.sum(), (raised_param == raised_moment).sum()):
        assert deviates(count, ELEMENTS, 0.5) < Z


@pytest.mark.isa
def test_a_nan_among_the_largest_moments_stays():
    p = torch.ones(40).requires_grad_()
    optimizer = onepass.optim.AdamW([p], amsgrad=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["max_exp_avg_sq"][3] = math.nan
    optimizer.step()
    assert p.isnan().nonzero().tolist() == [[3]]


@pytest.mark.isa
@counts
@pytest.mark.parametrize("master", [None, "stochastic", "remainder16"])
@pytest.mark.parametrize("name", ["lr", "grad_scale"])
def test_rounding_keeps_any_nan(name, master, count):
    """Also a NaN of ones alone, as CUDA makes it, to which nothing may be added."""
    number = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)
    param = torch.nn.Parameter(torch.ones(count, dtype=BF16))
    optimizer = onepass.optim.AdamW([param], master=master, state_dtype=BF16)
    param.grad = torch.ones_like(param)
    optimizer.step()
    if name == "lr":
        optimizer.param_groups[0]["lr"] = number
    else:
        optimizer.grad_scale = number
    optimizer.step()
    assert param.isnan().all()
    moments = [optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
    assert all(moment.isnan().all() for moment in moments) == (name == "grad_scale")


@pytest.mark.isa
@counts
def test_a_nan_stays_one_whatever_its_remainder(count):
    param = torch.nn.Parameter(torch.randn(count).to(BF16))
    optimizer = onepass.optim.AdamW([param], master="remainder16", state_dtype=BF16)
    for _ in range(3):
        param.grad = torch.randn(count).to(BF16)
        optimizer.step()
    param.data.fill_(math.nan)  # not noticed by its master
    optimizer.step()
    assert param.isnan().all()


# ---- 16-bit moments ------------------------------------------------------------------------------


def second_moments(cls, dtype, gradient, **extras):
    """After 100 steps with one gradient, beginning at 1; and what they are in exact arithmetic."""
    p = torch.ones(ELEMENTS, dtype=dtype).requires_grad_()
    optimizer = cls([p], lr=0.0, **extras)
    p.grad = torch.full((ELEMENTS,), gradient, dtype=dtype)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        optimizer.step()
    values = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    return values, gradient**2 + (1 - gradient**2) * 0.999**100


@pytest.mark.isa
@pytest.mark.parametrize(
    "dtype, gradient, options, kept, slack",
    [
        (F32, 1.1015625, {"state_dtype": BF16}, BF16, 1e-6),
        (BF16, 0.0, {"state_dtype": BF16}, BF16, 1e-6),
        (BF16, 1.1015625, {"state_dtype": BF16}, BF16, 1e-6),
        (BF16, 1.1015625, {"master": "stochastic"}, BF16, 1e-6),
        (BF16, 1.1015625, {"master": "fp32"}, F32, 1e-4),
        (BF16, 1.1015625, {"master": "remainder16"}, F32, 1e-4),
    ],
    ids=str,
)
def test_second_moments_are_unbiased_where_the_nearest_would_stall(
    dtype, gradient, options, kept, slack
):
    """In 16 bits, and with the defaults of masters: with beta2 = 0.999 a step moves exp_avg_sq by
    less than half the distance of neighbours."""
    found, expected = second_moments(onepass.optim.AdamW, dtype, gradient, **options)
    nearest, _ = second_moments(torch.optim.AdamW, BF16, gradient)
    assert found.dtype is kept and (nearest == 1).all() and abs(expected - 1) > 0.01
    found = found.double()
    assert abs(found.mean() - expected) < Z * found.std() / math.sqrt(ELEMENTS) + slack


DEFAULTS = {None: None, "fp32": F32, "remainder16": F32, "stochastic": BF16}


@names
@pytest.mark.parametrize("master", DEFAULTS)
def test_dtypes_of_moments_that_nobody_asked_for(master, name):
    for dtype in (F32, BF16, F16, F64):
        if (master, dtype) == ("remainder16", F16):
            continue
        entries = steps(made(name, SHAPES, dtype, master=master), 1).state_dict()["state"]
        expected = DEFAULTS[master] if dtype.itemsize == 2 and master else dtype
        assert {entry[first_moment(name)].dtype for entry in entries.values()} == {expected}


def test_momenta_of_a_checkpoint_without_steps_go_on():
    """torch's SGD counts no steps, and the noise of ours is keyed by them."""
    p = torch.ones(4, dtype=BF16, requires_grad=True)
    before = torch.optim.SGD([p], lr=0.0, momentum=0.5)
    p.grad = torch.full((4,), 4.0, dtype=BF16)
    before.step()
    after = onepass.optim.SGD([p], lr=0.0, momentum=0.5, master="stochastic")
    after.load_state_dict(before.state_dict())
    p.grad = torch.ones(4, dtype=BF16)
    after.step()
    assert (after.state[p]["momentum_buffer"] == 3.0).all()


@pytest.mark.isa
@names
def test_first_moments_in_16_bits_are_the_nearest(name):
    found, exact = (
        steps(made(name, SHAPES, state_dtype=state_dtype), 1).state_dict()["state"]
        for state_dtype in (BF16, F32)
    )
    for index, entries in exact.items():
        key = first_moment(name)
        assert same(found[index][key], entries[key].bfloat16())


# ---- 8 bits --------------------------------------------------------------------------------------


def code_values(width):
    """The numbers of core/code8.h: octaves of 8, a linear fraction after the leading one."""
    values = [0.0]
    for code in range(1, 1 << width):
        leading = code.bit_length() - 1
        octave, place = width - 1 - leading, code - (1 << leading)
        values.append(8.0**-octave * (1 / 8 + 7 / 8 * (place + 1) / (1 << leading)))
    values[1] = 8.0 ** -(width - 1)
    return torch.tensor(values, dtype=F64)


def moments(name, gradient, **extras):
    p = torch.zeros(gradient.numel(), requires_grad=True)
    optimizer = ours(name)([p], **FLAGS[name], **extras)
    p.grad = gradient.clone()
    optimizer.step()
    return optimizer.state_dict()["state"][0]


def varied():
    """64 blocks of magnitudes 1e-8 to 1e8 whose elements span six orders of magnitude."""
    gradient = torch.randn(64, BLOCK) * 10 ** (-6 * torch.rand(64, BLOCK))
    gradient *= 10 ** torch.linspace(-8, 8, 64)[:, None]
    gradient[:, 7] = 0.0
    return gradient.flatten()


def of_codes(name, key, width):
    """(what is kept in 8 bits, what is exact) in parts of a block's largest; for each exact part
    the codes' values below and above its magnitude."""
    gradient = varied()
    exact, kept = (
        moments(name, gradient, state_dtype=dtype)[key].double().view(-1, BLOCK)
        for dtype in (None, "int8")
    )
    largest = exact.abs().amax(1, keepdim=True)
    found, parts = kept / largest, exact / largest
    values = code_values(width)
    index = torch.searchsorted(values, parts.abs().clamp(max=1.0)).clamp(min=1)
    assert (found[:, 7] == 0).all()
    return found, parts, values[index - 1], values[index]


@pytest.mark.isa
@names
def test_8_bit_first_moments_are_the_nearest_code(name):
    found, parts, below, above = of_codes(name, first_moment(name), 7)
    nearest = torch.minimum(parts.abs() - below, above - parts.abs())
    error = (found - parts).abs()
    slack = (above - below) * 2**-13 + 1e-6 * parts.abs()  # values in the middle may go either way
    assert (error <= nearest + slack).all()
    assert error.max() <= 7 / 1024 + 1e-6
    assert (found * parts >= 0).all()


@pytest.mark.isa
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_8_bit_second_moments_are_a_neighbouring_code(name):
    found, parts, below, above = of_codes(name, "exp_avg_sq", 8)
    slack = 1e-6 * parts
    assert ((found >= below - slack) & (found <= above + slack)).all()
    assert (torch.minimum(found - below, above - found).abs() <= slack + 1e-12).all()


@pytest.mark.isa
@pytest.mark.parametrize("count", [1, 20])
def test_8_bit_second_moments_are_unbiased(count):
    part = 0.4  # of the block's largest
    gradient = torch.full((128, BLOCK), math.sqrt(part))
    gradient[:, 100] = 1.0
    p = torch.zeros(gradient.numel(), requires_grad=True)
    optimizer = onepass.optim.AdamW([p], lr=0.0, state_dtype="int8")
    for _ in range(count):
        p.grad = gradient.flatten()
        optimizer.step()
    found = optimizer.state_dict()["state"][0]["exp_avg_sq"].double().view(-1, BLOCK)
    others = torch.cat([found[:, :100], found[:, 101:]], dim=1) / found[:, 100:101]
    mean = float(gradient[0, 0].double() ** 2)
    assert others.std() > 0
    assert abs(others.mean() - mean) < Z * others.std() / math.sqrt(others.numel()) + 1e-6


@names
def test_small_and_odd_tensors_stay_float32(name):
    sizes = ((5,), (255,), (256,), (3840,), (4095,), (4097,), (4096 + 128,), ())
    found = steps(made(name, sizes, state_dtype="int8"), 3)
    assert_same(snapshot(found), snapshot(steps(made(name, sizes, state_dtype=F32), 3)))
    for size in ((4096,), (64, 64), (17, 256)):
        found = snapshot(steps(made(name, (size,), state_dtype="int8"), 1))
        expected = snapshot(steps(made(name, (size,), state_dtype=F32), 1))
        assert not same(found[0, first_moment(name)], expected[0, first_moment(name)])


@names
def test_states_in_8_bits_take_a_quarter_of_the_memory(name):
    """And 2 bytes more per 64 elements for the blocks' scales."""

    def state_bytes(state_dtype):
        optimizer = steps(made(name, (1 << 16,), state_dtype=state_dtype), 1)
        (entry,) = optimizer.state.values()
        storages = [tensor.untyped_storage() for tensor in entry.values() if tensor.dim()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    assert state_bytes("int8") <= state_bytes(F32) * (1 / 4 + 1 / 256) + 4096


@names
@pytest.mark.parametrize("mode", ["fp32", "remainder16"])
def test_a_master_in_another_order_is_stepped(mode, name):
    """The master gets its parameter's memory order, and the state holds that one."""
    expected = steps(made(name, ((6, 4),), BF16, **MODES[mode]), 2)
    optimizer = steps(made(name, ((6, 4),), BF16, **MODES[mode]), 1)
    (p,) = members(optimizer)
    key = "master" if mode == "fp32" else "remainder"
    optimizer.state[p][key] = optimizer.state[p][key].T.contiguous().T
    assert_same(snapshot(steps(optimizer, 1, first=1)), snapshot(expected))


# ---- what stalls is warned of --------------------------------------------------------------------

ONE = r"with master=None are .*: parameters are"
BOTH = "with master=None and state_dtype=None are .*: parameters and second moments are rounded to"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "name, options, message",
    [("AdamW", {}, BOTH), ("Adam", {}, BOTH), ("AdamW", {"state_dtype": BF16}, ONE)]
    + [("AdamW", {"state_dtype": "int8"}, ONE), ("SGD", {"momentum": 0.9}, ONE)]
    + [(name, {}, ONE) for name in ("Lion", "Muon", "LAMB", "Adafactor")],
)
def test_what_is_known_to_stall_is_warned_of_by_name(name, options, message, dtype):
    params = [torch.ones(4, 4, dtype=dtype).requires_grad_()]
    word = str(dtype).removeprefix("torch.")
    with pytest.warns(UserWarning, match=f"^{name}: {word} parameters {message}") as caught:
        ours(name)(params, **options)
    assert len(caught) == 1


def test_of_muon_and_adamw_each_group_is_warned_of():
    params = [torch.ones(4, 4, dtype=BF16).requires_grad_() for _ in range(2)]
    groups = [{"params": [p], "use_muon": k == 0} for k, p in enumerate(params)]
    with pytest.warns(UserWarning) as caught:
        onepass.optim.MuonWithAdamW(groups)
    muon, adamw = (str(warning.message) for warning in caught)
    assert "second moments" not in muon and "second moments" in adamw


@names
@pytest.mark.parametrize("master", [None, "fp32", "remainder16", "stochastic"])
def test_nothing_else_is_warned_of(master, name, recwarn):
    made(name, SHAPES, BF16 if master else F32, master=master)
    assert not recwarn.list


def test_a_warning_is_given_once():
    """By Python's default filter."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            onepass.optim.AdamW([torch.ones(4, dtype=BF16, requires_grad=True)])
    assert len(caught) == 1
