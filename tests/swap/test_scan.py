"""swap, kind "scan": functions of state-space layers that a forward calls, by a numeric test."""

import copy
import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import _dispatch_log, numerics
from onepass.swapping import classes
from onepass.swapping.classes import Swapped
from onepass.swapping.reasons import Reason
from onepass.swapping.specs import ScanSpec
from tests.swap import foreign_scans, scan_models
from tests.swap.foreign_scans import CHANNELS, STATE, TOKENS, Convolution, Scan, stands_for

pytestmark = pytest.mark.usefixtures("probed_once")


def swap(model: nn.Module, **options) -> onepass.Report:
    return onepass.swap(model, kinds="scan", **options)


class Calling(nn.Module):
    def forward(self, *args, **named):
        return function(*args, **named)  # noqa: F821


class CallingTwo(nn.Module):
    def forward(self, *args):
        return function(*args), other(*args)  # noqa: F821


def calling(function, cls: type[nn.Module] = Calling, **others) -> nn.Module:
    """A module that calls the function, by a global name."""
    variables = {**globals(), "function": function, **others}
    forward = types.FunctionType(cls.forward.__code__, variables, "forward")
    return type(cls.__name__, (cls,), {"forward": forward})()


def ours(model: nn.Module, *args, **named) -> list[str]:
    """The operators of ours that run, without those whose calls torch computes."""
    with _dispatch_log.record() as calls:
        model(*args, **named)
    return [call["op"] for call in calls if call["level"] != _dispatch_log.TORCH]


def of_convolution(dtype=torch.float32, **more) -> dict:
    x, weight = torch.randn(2, CHANNELS, TOKENS), torch.randn(CHANNELS, 4)
    return {"hidden_states": x.to(dtype), "weight": weight.to(dtype)} | more


def of_scan(dtype=torch.float32, **more) -> dict:
    u, dt, z = (torch.randn(2, CHANNELS, TOKENS, dtype=dtype) for _ in range(3))
    B, C = (torch.randn(2, STATE, TOKENS, dtype=dtype) for _ in range(2))
    A = -torch.rand(CHANNELS, STATE)
    return dict(hidden_states=u, dt=dt, A=A, B=B, C=C, z=z, delta_softplus=True) | more


def of_delta_rule(dtype=torch.float32, channels=False, **more) -> dict:
    """Two heads of keys for four of values; with a decay of each channel, four."""
    heads = 4 if channels else 2
    q, k = (torch.randn(2, TOKENS, heads, 6, dtype=dtype) for _ in range(2))
    v, beta = torch.randn(2, TOKENS, 4, 8, dtype=dtype), torch.rand(2, TOKENS, 4, dtype=dtype)
    g = -torch.rand((2, TOKENS, 4, 6) if channels else (2, TOKENS, 4))
    given = dict(query=q, key=k, value=v, g=g, beta=beta, initial_state=None)
    return given | dict(output_final_state=True, use_qk_l2norm_in_kernel=True) | more


# ---- what is found -------------------------------------------------------------------------------


def reversed_in_time(hidden_states, weight, bias=None, activation=None, **kwargs):
    found = foreign_scans.convolve(hidden_states.flip(-1), weight, bias, activation)
    return found.flip(-1)


def of_float32(hidden_states, weight, bias=None, activation=None, **kwargs):
    return foreign_scans.convolve(hidden_states, weight, bias, activation).float()


def with_another_argument(x, weight, bias=None, activation=None):
    return foreign_scans.convolve(x, weight, bias, activation)


def failing(hidden_states, weight, bias=None, activation=None):
    raise ValueError("not like this")


def leaving_the_state(hidden_states, conv_state, weight, bias=None, activation=None):
    given = hidden_states, conv_state.clone(), weight, bias, activation
    return foreign_scans.convolve_next(*given)


def without_softplus(
    hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False, use_mambapy=False, use_associative_scan=False, **kwargs,
):  # fmt: skip
    scan = foreign_scans.scan
    return scan(hidden_states, dt, A, B, C, D, z, delta_bias, return_last_state=return_last_state)


def of_another_epsilon(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):  # fmt: skip
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel
    return foreign_scans.attend(query, key, value, g, beta, chunk_size, *options, epsilon=1e-3)


def of_decays_of_heads(
    query, key, value, g, beta, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel
    g = g if g.dim() == 3 else g.mean(-1)
    return foreign_scans.attend(query, key, value, g, beta, 64, *options)


def computing_a_layer(xz, *args, **kwargs):
    return torch.zeros(1)


REFUSED = {
    reversed_in_time: ("causal_conv1d_fn", "function is not a causal convolution"),
    of_float32: ("causal_conv1d_fn", "returns other tensors than a causal convolution does in bfl"),
    with_another_argument: (
        "causal_conv1d_fn",
        "function takes (x, weight, bias, activation), not",
    ),
    failing: ("causal_conv1d_fn", "function fails: not like this"),
    leaving_the_state: ("causal_conv1d_update", "function is not a step of a causal convolution"),
    without_softplus: ("selective_scan_fn", "function is not a selective scan"),
    of_another_epsilon: ("chunk_gated_delta_rule", "function is not a gated delta rule"),
    of_decays_of_heads: ("fused_recurrent_kda", "function is not Kimi delta attention"),
    computing_a_layer: ("mamba_inner_fn", "function computes a layer itself"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_a_function_that_computes_something_else_is_refused(function):
    of_package, words = REFUSED[function]
    model = calling(stands_for(of_package)(function))
    (entry,) = swap(model).skipped
    assert entry["reason"].kind is Reason.SCAN and words in entry["reason"]
    with pytest.raises(RuntimeError, match="no refused candidate under strict"):
        swap(model, strict=True)


def test_a_function_that_stays_is_named_in_the_notes():
    other = stands_for("causal_conv1d_fn")(failing)
    report = swap(calling(foreign_scans.convolve, CallingTwo, other=other), strict=True)
    assert any("other fails: not like this" in note for note in report.notes)


def test_a_layer_that_is_left_to_a_refused_function_is_skipped():
    other = stands_for("causal_conv1d_fn")(failing)
    (entry,) = swap(calling(foreign_scans.whole_layer, CallingTwo, other=other)).skipped
    assert "other fails: not like this" in entry["reason"]


def test_the_name_decides_nothing():
    args = of_convolution()
    for function in (
        foreign_scans.convolve.__wrapped__,  # not decorated
        stands_for("causal_conv1d_fn", "another_package")(foreign_scans.convolve.__wrapped__),
        stands_for("another_function", "causal_conv1d")(foreign_scans.convolve.__wrapped__),
    ):
        model = calling(function)
        report = swap(model)
        assert not (report.swapped or report.skipped or report.unknown)
        assert not ours(model, **args)


def test_modules_of_the_package_kernels_are_functions_too():
    """As `kernels.use_kernel_forward_from_hub` makes them of a function."""
    func = foreign_scans.convolve

    class Func(nn.Module):
        kernel_layer_name = "causal_conv1d_fn"

        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    model, args = calling(Func()), of_convolution()
    expected = model(**args)
    swap(model, strict=True)
    assert ours(model, **args) == ["causal_conv1d"]
    torch.testing.assert_close(model(**args), expected)


def test_a_forward_that_cannot_be_copied_is_listed():
    class Unseen(Convolution):
        pass

    inner = Convolution.forward

    class Wrapper:
        def __call__(self, module, x):
            return inner(module, x)

    wrapper = Wrapper()

    def forward(self, x):
        return wrapper(self, x)

    Unseen.forward = functools.wraps(inner)(forward)
    (entry,) = swap(Unseen()).skipped
    assert entry["reason"].kind is Reason.DECORATED


def test_on_a_gpu_the_packages_are_named():
    model = nn.Sequential(Convolution(), Scan(), scan_models.build("kimi_linear").model.layers[0])
    with FakeTensorMode():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, device="cuda")
                module._parameters[name] = nn.Parameter(empty)
    report = swap(model, strict=True)  # nothing is refused
    assert not report.swapped
    reasons = [entry["reason"] for entry in report.skipped]
    assert [reason.kind for reason in reasons] == [Reason.SCAN_ELSEWHERE] * 3
    assert "causal convolution" in reasons[0] and "causal-conv1d" in reasons[0]
    assert "selective scan" in reasons[1] and "mamba-ssm" in reasons[1]
    assert "its causal convolution and Kimi delta attention run as before" in reasons[2]
    assert "causal-conv1d and flash-linear-attention" in reasons[2]


def test_what_the_report_says():
    report = swap(nn.ModuleDict({"convolution": Convolution(), "scan": Scan()}))
    to = {entry["name"]: entry["to"] for entry in report.swapped}
    assert to == {"convolution": "onepass causal convolution", "scan": "onepass selective scan"}
    assert any("scan: onepass's operators compute their selective scan;" in x for x in report.notes)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.fixture
def convolving():
    model = calling(foreign_scans.convolve)
    swap(model, strict=True)
    return model


@pytest.fixture
def scanning():
    model = calling(foreign_scans.scan)
    swap(model, strict=True)
    return model


def test_which_convolutions_are_ours(convolving):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert ours(convolving, **of_convolution(dtype)) == ["causal_conv1d"]
    assert ours(convolving, **of_convolution(activation="silu")) == ["causal_conv1d"]
    given = of_convolution()
    assert ours(convolving, *given.values(), unknown=3) == ["causal_conv1d"]  # stock drops it too
    for other in (
        of_convolution(activation="gelu"),
        of_convolution() | {"weight": torch.randn(CHANNELS, 11)},
        of_convolution(torch.complex64),
    ):
        assert not ours(convolving, **other)
        assert torch.equal(convolving(**other), foreign_scans.convolve(**other))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight'"):
        convolving(given["hidden_states"])


def test_which_scans_are_ours(scanning):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for more in ({}, {"D": torch.randn(CHANNELS), "delta_bias": torch.randn(CHANNELS)}):
            given = of_scan(dtype, return_last_state=True, **more)
            assert ours(scanning, **given) == ["selective_scan"]
            found, expected = scanning(**given), foreign_scans.scan(**given)
            assert [x.dtype for x in found] == [x.dtype for x in expected]
            assert [x.shape for x in found] == [x.shape for x in expected]
    assert not ours(scanning, **of_scan(torch.float64))  # A is float32
    mixed = of_scan(torch.bfloat16) | {"C": torch.randn(2, STATE, TOKENS)}
    assert not ours(scanning, **mixed)


DELTA_RULES = {
    "delta_rule": (foreign_scans.gated_delta_rule, False),
    "delta_rule_update": (foreign_scans.kimi_delta_attention, True),
}


@pytest.mark.parametrize("op", DELTA_RULES)
def test_which_delta_rules_are_ours(op):
    function, channels = DELTA_RULES[op]
    model = calling(function)
    swap(model, strict=True)
    state = torch.randn(2, 4, 6, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for more in ({}, {"initial_state": state}, {"output_final_state": False}):
            given = of_delta_rule(dtype, channels, **more)
            before = state.clone()
            assert ours(model, **given) == [op]
            found, expected = model(**given), function(**given)
            assert torch.equal(state, before)
            kinds = [[x is not None and (x.dtype, x.shape) for x in y] for y in (found, expected)]
            assert kinds[0] == kinds[1]
    mixed = of_delta_rule(torch.bfloat16, channels) | {"value": torch.randn(2, TOKENS, 4, 8)}
    assert ours(model, **mixed) == [op]
    assert model(**mixed)[0].dtype is function(**mixed)[0].dtype is torch.bfloat16
    given = of_delta_rule(torch.bfloat16, channels)
    mixed = given | {"query": torch.randn_like(given["query"], dtype=torch.float32)}
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in mixed.items()}
    with scan_models.InDouble():
        exact = function(**wide)
    numerics.assert_close(model(**mixed), exact, function(**mixed), "a value of fewer digits")
    assert not ours(model, **of_delta_rule(torch.float64, channels))  # g is float32
    whole = {n: x.double() if n == "g" else x for n, x in of_delta_rule(torch.float64).items()}
    if not channels:
        assert ours(model, **whole) == [op]
        assert [x.dtype for x in model(**whole)] == [torch.float64, torch.float32]  # as theirs
        assert [x.dtype for x in function(**whole)] == [torch.float64, torch.float32]


def test_delta_rules_under_autocast():
    model = calling(foreign_scans.gated_delta_rule)
    swap(model, strict=True)
    given = of_delta_rule(torch.bfloat16)
    expected = model(**given)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(model, **given) == ["delta_rule"]
        for found, own in zip(model(**given), expected, strict=True):
            assert found.dtype is own.dtype and torch.equal(found, own)


def test_under_autocast_dtypes_are_theirs(convolving):
    given = of_convolution(activation="silu")
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(convolving, **given) == ["causal_conv1d"]
        found, expected = convolving(**given), foreign_scans.convolve(**given)
    assert found.dtype is expected.dtype is torch.float32
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    numerics.assert_close([found], [foreign_scans.convolve(**wide)], [expected], "under autocast")


def test_steps_of_decoding_write_their_state():
    model = calling(foreign_scans.convolve_next)
    swap(model, strict=True)
    x, state = torch.randn(2, CHANNELS, 1), torch.randn(2, CHANNELS, 4)
    given = dict(hidden_states=x, weight=torch.randn(CHANNELS, 4), activation="silu")
    states = state.clone(), state.clone()
    assert ours(model, conv_state=state, **given) == ["causal_conv1d_update"]
    found = model(conv_state=states[0], **given)
    expected = foreign_scans.convolve_next(conv_state=states[1], **given)
    torch.testing.assert_close(found, expected)
    assert torch.equal(*states)
    assert not ours(model, conv_state=state.bfloat16(), **given)  # not the input's dtype


def test_a_global_that_is_assigned_later_is_called(monkeypatch):
    model = Convolution()
    swap(model, strict=True)
    x = torch.randn(2, TOKENS, 16)
    assert ours(model, x) == ["causal_conv1d"]
    monkeypatch.setattr(foreign_scans, "convolve", lambda x, *_, **__: 0 * x)
    assert not ours(model, x)
    assert torch.equal(model(x), model.after.bias.expand(2, TOKENS, 16))


def test_a_function_assigned_before_a_pickle_is_loaded_is_called():
    model = Convolution()
    swap(model, strict=True)
    specs = [spec for spec in type(model)._onepass_spec if isinstance(spec, ScanSpec)]

    def mine(x, *others, **named):
        return 0 * x

    assert specs
    for spec in specs:
        assert classes._computing(mine, spec) is mine
        assert classes._computing(getattr(foreign_scans, spec.name), spec) is not mine


# ---- packed sequences ----------------------------------------------------------------------------

LENGTHS = (5, 1, 8)
SEQ_IDX = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None].int()


def refused_by_stock():
    return pytest.raises(ValueError, match="can't keep packed sequences apart")


def assert_as_each_alone(model: nn.Module, packed: Callable, alone: Callable) -> None:
    """By the numerics rule: the output of `packed(swapped)` and the gradients of its parameters,
    against `alone(stock)` in float64 and in float32. Swaps the model."""
    stock = copy.deepcopy(model)
    exact = copy.deepcopy(stock).double()
    swap(model, strict=True)
    with scan_models.InDouble():
        of_exact = alone(exact)
    runs = [(model, packed(model)), (exact, of_exact), (stock, alone(stock))]
    numerics.assert_close(*([output] for _, output in runs), "output")
    upstream, gradients = torch.randn_like(of_exact), []
    for module, output in runs:
        loss = (output * upstream.to(output)).sum()
        found = torch.autograd.grad(loss, [*module.parameters()], allow_unused=True)
        gradients.append([g for g in found if g is not None])
    largest = [of.abs().max() for of in gradients[1]]
    shares = (torch.cat([(g / m).flatten() for g, m in zip(own, largest, strict=True)])
              for own in gradients)  # fmt: skip
    found, of_exact, base = shares
    numerics.assert_close([found.float()], [of_exact], [base], "gradients")


SEQ_IDX_OF_MODELS = [
    "lfm2", "lfm2_moe", "zamba", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid",
    "kimi_linear", "bailing_hybrid",
]  # fmt: skip
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
CU_SEQLENS_OF_MODELS = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"]
PACKED = [(name, {"seq_idx": SEQ_IDX}) for name in SEQ_IDX_OF_MODELS]
PACKED += [(name, {"cu_seq_lens_q": CU_SEQLENS}) for name in CU_SEQLENS_OF_MODELS]


@pytest.mark.parametrize("name, packing", PACKED, ids=[f"{name}-{[*by][0]}" for name, by in PACKED])
def test_packed_sequences_are_as_each_alone(name, packing):
    """In the models that hand `seq_idx` or `cu_seq_lens_q` to their layers."""
    model = scan_models.build(name)
    ids = torch.randint(2, 31, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = {**packing, "position_ids": positions, "use_cache": False}
    with refused_by_stock():
        model(input_ids=ids, **packed)

    def alone(model):
        pieces = ids.split(LENGTHS, 1)
        return torch.cat([model(input_ids=p, use_cache=False).logits for p in pieces], 1)

    assert_as_each_alone(model, lambda model: model(input_ids=ids, **packed).logits, alone)


def layer_of(name: str) -> nn.Module:
    model = scan_models.build(name)
    swap(model, strict=True)
    return next(module for module in model.modules() if isinstance(module, Swapped))


def cache_of(name: str):
    return scan_models.transformers.DynamicCache(config=scan_models.build(name).config)


@pytest.mark.parametrize(
    "name", ["falcon_mamba", "jamba", "mamba", "mamba2", "inkling", "qwen4_exp", "glm5_next"]
)
def test_packed_sequences_of_a_layer(name):
    """In models that do not hand `seq_idx` to it, or whose attention mixes the sequences."""
    layer, x = layer_of(name), torch.randn(1, sum(LENGTHS), 32)
    x = x[..., :16] if name == "inkling" else x
    onepass.unswap(layer)
    with refused_by_stock():
        layer(x, seq_idx=SEQ_IDX)

    def alone(layer):
        pieces = x.to(next(layer.parameters()).dtype).split(LENGTHS, 1)
        return torch.cat([layer(piece) for piece in pieces], 1)

    assert_as_each_alone(layer, lambda layer: layer(x, seq_idx=SEQ_IDX), alone)


@pytest.mark.parametrize("name", ["falcon_mamba", "qwen3_next", "kimi_linear"])
def test_decoding_goes_on_with_the_last_of_packed_sequences(name):
    layer, x = layer_of(name), torch.randn(1, sum(LENGTHS), 32)
    with torch.no_grad():
        packed, alone = cache_of(name), cache_of(name)
        layer(x, cache_params=packed, seq_idx=SEQ_IDX)
        layer(x[:, -LENGTHS[-1] :], cache_params=alone)
        states = [cache.get_recurrent_state(0, state_idx=0) for cache in (packed, alone)]
        torch.testing.assert_close(*states)
        token = torch.randn(1, 1, 32)
        steps = [layer(token, cache_params=cache) for cache in (packed, alone)]
        torch.testing.assert_close(*steps)


def test_both_ways_of_packing_together():
    """Of Kimi Linear's functions in their packages, one takes `seq_idx` and the other
    `cu_seqlens`."""
    layer, x = layer_of("kimi_linear"), torch.randn(1, sum(LENGTHS), 32)
    expected = layer(x, seq_idx=SEQ_IDX)
    for both in (dict(cu_seqlens=CU_SEQLENS), dict(cu_seqlens=CU_SEQLENS, seq_idx=SEQ_IDX)):
        assert torch.equal(layer(x, **both), expected)


@pytest.mark.parametrize(
    "name, by", [("qwen3_next", "cu_seq_lens_q"), ("kimi_linear", "cu_seqlens")]
)
def test_packed_sequences_of_a_compiled_layer(name, by):
    """Compiled code cannot read where the numbers of `seq_idx` change."""
    layer, x = layer_of(name), torch.randn(1, sum(LENGTHS), 32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, **{by: CU_SEQLENS}), layer(x, seq_idx=SEQ_IDX))
    with refused_by_stock():
        torch.compile(layer, backend="eager")(x, seq_idx=SEQ_IDX)


def test_packed_sequences_after_others_raise():
    """The cache holds one sequence: it cannot be continued by several."""
    layer, x = layer_of("qwen3_next"), torch.randn(1, sum(LENGTHS), 32)
    cache = cache_of("qwen3_next")
    with torch.no_grad():
        layer(x, cache_params=cache)
        for packing in (dict(seq_idx=SEQ_IDX), dict(cu_seq_lens_q=CU_SEQLENS)):
            with refused_by_stock():
                layer(x, cache_params=cache, **packing)


@pytest.mark.parametrize("name", ["falcon_mamba", "qwen3_next", "kimi_linear"])
def test_rows_of_packed_sequences_raise_beside_a_scan(name):
    """A scan or delta rule takes packed sequences of one row."""
    with refused_by_stock():
        layer_of(name)(torch.randn(2, sum(LENGTHS), 32), seq_idx=SEQ_IDX.repeat(2, 1))
