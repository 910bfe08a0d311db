"""One bad argument at a time, for every public function: the error is of the type that torch's
function raises for it, where torch has one, and names the argument."""

import inspect
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass import functional

X = torch.randn(2, 4, 6, 8)
W, SQUARE = torch.ones(8), torch.zeros(6, 6)
FACTORS = torch.ones(2)
PACKED, CU = torch.randn(12, 4, 8), torch.tensor([0, 5, 12], dtype=torch.int32)
USED = torch.tensor([3, 2], dtype=torch.int32)
LSE = torch.zeros(2, 4, 6)

DELTA = dict(
    q=X, k=X, v=X, beta=X[..., 0], scale=0.5, initial_state=torch.zeros(2, 6, 8, 8),
    output_final_state=True, use_qk_l2norm_in_kernel=True,
)  # fmt: skip

# Right arguments of every function by name, with every one that takes a tensor or a number.
RIGHT = {
    "layer_norm": dict(input=X, normalized_shape=(8,), weight=W, bias=W, eps=1e-5),
    "rms_norm": dict(input=X, normalized_shape=(8,), weight=W, eps=1e-5, weight_offset=1.0),
    "add_layer_norm": dict(
        input=X, residual=X, normalized_shape=(8,), weight=W, bias=W, eps=1e-5, dropout_p=0.1,
        residual_dtype=torch.float32, column_scale=W, row_scale=FACTORS,
    ),
    "add_rms_norm": dict(
        input=X, residual=X, normalized_shape=(8,), weight=W, eps=1e-5, weight_offset=1.0,
        dropout_p=0.1, residual_dtype=torch.float32, column_scale=W, row_scale=FACTORS,
    ),
    "modulated_layer_norm": dict(
        input=X, normalized_shape=(8,), scale=X, shift=X, eps=1e-5, residual=X, gate=X
    ),
    "modulated_rms_norm": dict(
        input=X, normalized_shape=(8,), scale=X, shift=X, eps=1e-5, residual=X, gate=X
    ),
    "dropout": dict(input=X, p=0.5),
    "add_dropout": dict(input=X, residual=X, p=0.5, column_scale=W, row_scale=FACTORS),
    "drop_path_scale": dict(input=X, drop_prob=0.5),
    "gated_activation": dict(gate=X, up=X, activation="gelu"),
    "silu_mul": dict(gate=X, up=X),
    "group_norm": dict(
        input=X, num_groups=2, weight=W[:4], bias=W[:4], eps=1e-5, activation="silu"
    ),
    "gelu_mul": dict(gate=X, up=X, approximate="tanh"),
    "causal_conv1d": dict(
        x=X[0], weight=torch.ones(6, 3), bias=torch.ones(6), activation="silu",
        initial_state=torch.zeros(4, 6, 2),
    ),
    "causal_conv1d_update": dict(
        x=X[0], conv_state=torch.zeros(4, 6, 3), weight=torch.ones(6, 3), bias=torch.ones(6),
        activation="silu",
    ),
    "selective_scan": dict(
        u=X[0], delta=X[0], A=-W.expand(6, 8), B=torch.ones(4, 8, 8), C=torch.ones(4, 8, 8),
        D=torch.ones(6), z=X[0], delta_bias=torch.ones(6), delta_softplus=True,
        initial_state=torch.zeros(4, 6, 8),
    ),
    "mamba_chunk_scan": dict(
        x=X[:, :, :6], dt=X[:, :, :6, 0], A=-W[:6], B=torch.ones(2, 4, 1, 3),
        C=torch.ones(2, 4, 1, 3), chunk_size=64, D=torch.ones(6), z=X[:, :, :6],
        dt_bias=torch.ones(6), dt_softplus=True, initial_states=torch.zeros(2, 6, 8, 3),
        dt_limit=(0.0, 5.0),
    ),
    "chunk_gated_delta_rule": DELTA | dict(g=-X[..., 0].abs(), chunk_size=64),
    "chunk_kda": DELTA | dict(g=-X.abs(), chunk_size=64),
    "fused_recurrent_gated_delta_rule": DELTA | dict(g=-X[..., 0].abs()),
    "fused_recurrent_kda": DELTA | dict(g=-X.abs()),
    "delta_rule_update": dict(
        state=torch.zeros(2, 6, 8, 8), q=X, k=X, v=X, g=-X.abs(), beta=X[..., 0], scale=0.5,
        use_qk_l2norm_in_kernel=True,
    ),
    "selective_state_update": dict(
        state=torch.zeros(4, 6, 8), x=X[0, ..., 0], dt=X[0, ..., 0], A=-W.expand(6, 8),
        B=torch.ones(4, 8), C=torch.ones(4, 8), D=torch.ones(6), z=X[0, ..., 0],
        dt_bias=torch.ones(6), dt_softplus=True,
    ),
    "cross_entropy": dict(
        input=X.view(48, 8), target=torch.zeros(48, dtype=torch.int64), weight=W, ignore_index=-1,
        label_smoothing=0.1, softcap=2.0, z_loss=0.1,
    ),
    "linear_cross_entropy": dict(
        input=X.view(48, 8), linear_weight=torch.ones(5, 8),
        target=torch.zeros(48, dtype=torch.int64), linear_bias=torch.ones(5),
        weight=torch.ones(5), ignore_index=-1, label_smoothing=0.1, softcap=2.0, z_loss=0.1,
    ),
    "linear": dict(
        input=X, weight=torch.ones(5, 8), bias=torch.ones(5), dropout_p=0.1,
        residual=torch.ones(2, 4, 6, 5),
    ),
    "quantized_linear": dict(
        input=X, codes=torch.zeros(1, 2, 16, dtype=torch.int32), scales=torch.ones(1, 5),
        bias=torch.ones(5), weights="int8", activations="int8", residual=torch.ones(2, 4, 6, 5),
    ),
    "rotary_embedding": dict(
        query=X, key=X, cos=torch.ones(9, 8), sin=torch.ones(9, 8), rotary_dim=8,
        positions=torch.arange(6), query_weight=W, key_weight=W, eps=1e-6, weight_offset=1.0,
    ),
    "scaled_dot_product_attention": dict(
        query=X, key=X, value=X, attn_mask=SQUARE, dropout_p=0.1, scale=0.5,
        causal_alignment="top_left", window_size=(-1, -1), softcap=1.0, alibi_slopes=torch.ones(4),
        sinks=torch.ones(4),
    ),
    "varlen_attention": dict(
        query=PACKED, key=PACKED, value=PACKED, cu_seq_q=CU, cu_seq_k=CU, max_q=7, max_k=7,
        scale=0.5, window_size=(-1, -1), seqused_k=torch.tensor([5, 7], dtype=torch.int32),
        dropout_p=0.1, softcap=1.0, alibi_slopes=torch.ones(4), sinks=torch.ones(4),
        attn_mask=torch.zeros(7, 7),
    ),
    "attention_with_kv_cache": dict(
        query=X, k_cache=X.clone(), v_cache=X.clone(), key=X[:, :, :1], value=X[:, :, :1],
        cache_seqlens=USED, cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32),
        cache_leftpad=torch.tensor([0, 1], dtype=torch.int32), rotary_cos=torch.ones(9, 4),
        rotary_sin=torch.ones(9, 4), scale=0.5, window_size=(-1, -1), softcap=1.0,
        alibi_slopes=torch.ones(4), sinks=torch.ones(4), k_scale=None, v_scale=None,
    ),
    "merge_attention_states": dict(outputs=[X, X], lses=[LSE, LSE]),
}  # fmt: skip
STOCK = {
    "layer_norm": F.layer_norm, "rms_norm": F.rms_norm, "dropout": F.dropout,
    "cross_entropy": F.cross_entropy, "linear": F.linear,
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
}  # fmt: skip
NOT_TENSORS = {"None": None, "list": [1.0, 2.0], "float": 2.0, "numpy": np.ones((2, 8)), "str": "x"}
NOT_NUMBERS = {"str": "x", "tensor": X, "list": [1.0], "numpy": np.ones(3), "None": None}
NOT_DTYPES = {"str": "float32", "tensor": X, "float": 6.0}


def not_for(value) -> dict:
    """Values of the wrong type for an argument, given a right value."""
    if isinstance(value, (torch.Tensor, list)):
        return NOT_TENSORS
    if isinstance(value, (float, int)):
        return NOT_NUMBERS
    return NOT_DTYPES if isinstance(value, torch.dtype) else {}


def wrong_types():
    """(function, argument, values that the argument's annotation does not allow)"""
    for name, right in RIGHT.items():
        hints = inspect.get_annotations(getattr(functional, name))
        for argument, value in right.items():
            is_optional = "None" in hints[argument].split(" | ")
            bad = {k: v for k, v in not_for(value).items() if not (is_optional and k == "None")}
            if bad:
                yield pytest.param(name, argument, bad, id=f"{name}-{argument}")


def test_every_function_is_in_the_table():
    assert set(RIGHT) == set(functional.__all__)


@pytest.mark.parametrize("name", RIGHT)
def test_the_table_is_right(name):
    result = getattr(functional, name)(**RIGHT[name])
    assert torch.is_tensor(result) or len(result) == 2


@pytest.mark.parametrize("name, argument, wrong", wrong_types())
def test_wrong_types(name, argument, wrong):
    for kind, bad in wrong.items():
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                error = type_error(name, {argument: bad})
            told = re.match(rf"{name}: {argument} must be .*, got ", error)
            assert told, f"{kind}, gradients {grad}: {error}"


def type_error(name: str, changes: dict) -> str:
    try:
        getattr(functional, name)(**RIGHT[name] | changes)
    except TypeError as error:
        return str(error)
    return "no error"


NO_FLAGS = {"str": "x", "float": 1.5, "int": 1, "None": None, "tensor": torch.tensor(True)}
FLAGS = [
    (name, flag)
    for name in RIGHT
    for flag, hint in inspect.get_annotations(getattr(functional, name)).items()
    if hint == "bool" and flag != "inplace"  # torch's own takes any value
]


@pytest.mark.parametrize("name, flag", FLAGS)
def test_flags_are_true_or_false(name, flag):
    """As in torch, which takes neither numbers nor tensors for them."""
    of_torch = {
        "is_causal": lambda **bad: F.scaled_dot_product_attention(X, X, X, **bad),
        "enable_gqa": lambda **bad: F.scaled_dot_product_attention(X, X, X, **bad),
        "training": lambda **bad: F.dropout(X, **bad),
    }
    for kind, value in NO_FLAGS.items():
        if flag in of_torch:
            with pytest.raises(TypeError):
                of_torch[flag](**{flag: value})
        error = type_error(name, {flag: value})
        assert error.startswith(f"{name}: {flag} must be True or False, got "), (kind, error)


def test_a_mask_without_dimensions():
    """The type of torch's error."""
    for mask in (torch.tensor(0.5), torch.tensor(True)):
        with pytest.raises(IndexError):
            F.scaled_dot_product_attention(X, X, X, mask)
        with pytest.raises(IndexError, match="attn_mask must have a dimension for keys, got "):
            functional.scaled_dot_product_attention(X, X, X, mask)


# ---- values: the type of torch's error -----------------------------------------------------------

Y = X[:, :2]
VALUES = {
    "layer_norm": [
        dict(normalized_shape=(7,)), dict(normalized_shape=()), dict(weight=W[:7]),
        dict(bias=W[:7]), dict(input=X.long()), dict(normalized_shape=(8.0,)),
    ],
    "rms_norm": [dict(normalized_shape=(7,)), dict(weight=W[:7]), dict(normalized_shape="8")],
    "dropout": [dict(p=-0.1), dict(p=1.1)],
    "linear": [
        dict(input=X[..., :7]), dict(weight=torch.ones(5, 7)), dict(weight=torch.ones(2, 5, 8)),
        dict(bias=W[:3]), dict(bias=torch.ones(5, 5)), dict(input=X.long()),
        dict(weight=torch.ones(5, 8).double()), dict(input=X[0, 0, 0, 0]),
    ],
    "scaled_dot_product_attention": [
        dict(key=X.double()), dict(value=X.half()), dict(key=X[..., :7]),
        dict(query=X[0, 0, 0]), dict(key=Y, value=Y), dict(key=X[:, :3], value=X[:, :3]),
        dict(key=X[:, :3], value=X[:, :3], enable_gqa=True),
        dict(attn_mask=SQUARE[:5]), dict(attn_mask=SQUARE[:, :5]), dict(attn_mask=SQUARE.int()),
        dict(attn_mask=torch.zeros(3, 1, 6, 6)), dict(attn_mask=torch.zeros(1, 2, 4, 6, 6)),
        dict(dropout_p=1.5), dict(dropout_p=-0.5),
        dict(query=X.to("meta")),
    ],
}  # fmt: skip


def error_of(function, arguments) -> type[Exception]:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        function(**arguments)
    return next(t for t in (TypeError, ValueError, RuntimeError) if raised.errisinstance(t))


@pytest.mark.parametrize(
    "name, changes", [(name, changes) for name, cases in VALUES.items() for changes in cases]
)
def test_wrong_values(name, changes):
    function, stock = getattr(functional, name), STOCK[name]
    parameters = inspect.signature(function).parameters
    required = {k: v for k, v in RIGHT[name].items() if parameters[k].default is inspect._empty}
    expected = error_of(stock, required | changes)
    with pytest.raises(expected, match=r"^\w+: .* must ") as ours:
        function(**required | changes)
    assert type(ours.value) is expected


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(query=X), RuntimeError), (dict(cu_seq_q=CU.long()), RuntimeError),
        (dict(key=PACKED[:, :3], value=PACKED[:, :3]), ValueError),
        (dict(key=PACKED[:, :3], value=PACKED[:, :3], enable_gqa=True), RuntimeError),
        (dict(key=PACKED[..., :7]), RuntimeError), (dict(value=PACKED.double()), RuntimeError),
    ],
    ids=["dimensions", "dtype of lengths", "heads", "heads that divide not", "head_dim", "dtypes"],
)  # fmt: skip
def test_wrong_values_of_packed_sequences(changes, expected):
    with pytest.raises(expected, match=r"^(varlen_)?attention: .* must .*, got "):
        functional.varlen_attention(**RIGHT["varlen_attention"] | changes)


def some(**arguments: str) -> list[tuple[str, str]]:
    """(function, argument) of each function's arguments."""
    return [(name, argument) for name, of in arguments.items() for argument in of.split()]


@pytest.mark.parametrize(
    "name, argument",
    some(scaled_dot_product_attention="query", varlen_attention="query cu_seq_q",
         attention_with_kv_cache="query k_cache cache_seqlens"),
)  # fmt: skip
def test_tensors_without_dimensions(name, argument):
    right = RIGHT[name]
    bad = torch.zeros((), dtype=right[argument].dtype)
    for scale in (None, 0.5):
        with pytest.raises(RuntimeError, match=rf"^\w+: {argument} must .*, got "):
            getattr(functional, name)(**right | {argument: bad, "scale": scale})


@pytest.mark.parametrize(
    "name, argument",
    some(scaled_dot_product_attention="query attn_mask", varlen_attention="query",
         attention_with_kv_cache="query k_cache", layer_norm="weight", silu_mul="gate",
         group_norm="input", gated_activation="up", cross_entropy="input target",
         linear_cross_entropy="input linear_weight", linear="input residual"),
)  # fmt: skip
def test_nested_tensors(name, argument):
    nested = torch.nested.as_nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    with pytest.raises(RuntimeError, match=rf"^{name}: {argument} must not be nested, got"):
        getattr(functional, name)(**RIGHT[name] | {argument: nested})


@pytest.mark.parametrize(
    "name", ["scaled_dot_product_attention", "varlen_attention", "attention_with_kv_cache"]
)
def test_windows(name):
    pair, whole = r"\(left, right\)", "a sequence of whole numbers"
    for window, error, wanted in (
        (4, TypeError, pair), (np.ones(3), ValueError, pair), ((1, 2, 3), ValueError, pair),
        (None, TypeError, pair), ((1.5, 2), TypeError, whole),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"^{name}: window_size must be {wanted}"):
            getattr(functional, name)(**RIGHT[name] | {"window_size": window})


@pytest.mark.parametrize(
    "name",
    [n for n in RIGHT if "precision" in inspect.signature(getattr(functional, n)).parameters],
)
def test_other_precisions_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}: precision must be None, 'highest', 'high', 'm"):
        getattr(functional, name)(**RIGHT[name], precision="low")


# ---- modules -------------------------------------------------------------------------------------

MODULES = {
    "LayerNorm": lambda of: of.LayerNorm(8),
    "RMSNorm": lambda of: of.RMSNorm(8),
    "Dropout": lambda of: of.Dropout(0.5),
    "Linear": lambda of: of.Linear(8, 5),
    "CrossEntropyLoss": lambda of: (
        lambda x: of.CrossEntropyLoss()(x, torch.zeros(3, dtype=torch.int64))
    ),
    "Dropout in eval": lambda of: of.Dropout(0.5).eval(),
    "MultiheadAttention": lambda of: (
        lambda x: of.MultiheadAttention(8, 2)(x, x, x, need_weights=False)
    ),
    "TransformerEncoderLayer": lambda of: of.TransformerEncoderLayer(8, 2, 8),
}


@pytest.mark.parametrize("kind", NOT_TENSORS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_raise_what_torchs_do(name, kind):
    with pytest.raises(Exception) as stock:
        MODULES[name](nn)(NOT_TENSORS[kind])
    with pytest.raises(Exception) as ours:
        MODULES[name](onepass.nn)(NOT_TENSORS[kind])
    assert type(ours.value) is type(stock.value)


@pytest.mark.parametrize("cls", [onepass.nn.AddLayerNorm, onepass.nn.AddRMSNorm])
def test_modules_of_two_tensors(cls):
    for kind, bad in NOT_TENSORS.items():
        with pytest.raises(TypeError, match="input must be a tensor, got "):
            cls(8)(bad, X)
        if kind != "None":
            with pytest.raises(TypeError, match="residual must be a tensor or None, got "):
                cls(8)(X, bad)


# ---- swap, explain, optimizers -------------------------------------------------------------------

OF_SWAP = {
    "kinds": (3, [nn.LayerNorm]), "include": (3, [3]), "exclude": (1.5, [None]),
    "force": (3, [nn.LayerNorm]), "filter_fn": (3, "x"), "dry_run": ("x", 1), "strict": (1.5, None),
    "probe": ("no", 0),
}  # fmt: skip


@pytest.mark.parametrize("name, bad", [(n, bad) for n, all in OF_SWAP.items() for bad in all])
def test_options_of_swap(name, bad):
    model = nn.Sequential(nn.LayerNorm(8))
    with pytest.raises(TypeError, match=rf"^swap: {name} must .*, got "):
        onepass.swap(model, **{name: bad})
    assert type(model[0]) is nn.LayerNorm


@pytest.mark.parametrize("bad", [None, 3, "x", nn.LayerNorm, [nn.LayerNorm(8)]])
def test_what_is_no_model_and_no_optimizer(bad):
    named = {
        "swap: model": onepass.swap,
        "unswap: model": onepass.unswap,
        "fuse: optimizer": onepass.optim.fuse,
    }
    if not callable(bad):
        named["explain: fn_or_module"] = onepass.explain
    for name, function in named.items():
        with pytest.raises(TypeError, match=rf"^{name} must be .*, got "):
            function(bad)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion"])
def test_settings_of_optimizers(name):
    """For torch's own settings they raise as torch's constructors do."""
    make, params = getattr(onepass.optim, name), [torch.zeros(4, requires_grad=True)]
    for bad in ({"max_grad_norm": "x"}, {"zero_grads": "x"}, {"zero_grads": 1}):
        with pytest.raises(TypeError, match=rf"^{name}: {next(iter(bad))} must be .*, got "):
            make(params, **bad)
    stock = getattr(torch.optim, name, None)
    settings = [{"lr": "x"}, {"lr": None}, {"weight_decay": "x"}]
    settings += [{"momentum": "x"}] if name == "SGD" else [{"betas": 3}, {"betas": ("a", "b")}]
    for bad in settings:
        if stock is not None:
            with pytest.raises(TypeError):
                stock(params, **bad)
        with pytest.raises(TypeError):
            make(params, **bad)


def test_lion_has_two_betas():
    with pytest.raises(ValueError, match="^Lion: betas must be two numbers, got "):
        onepass.optim.Lion([torch.zeros(4, requires_grad=True)], betas=(0.9,))


def _attention(x, **options):
    return functional.scaled_dot_product_attention(x, x, x[..., :3, :], **options)


# Calls that an operator refuses, with dropout_p as a keyword.
REFUSED = {
    "dropout": lambda x, dropout_p: functional.dropout(x.int(), dropout_p),
    "add_dropout": lambda x, dropout_p: functional.add_dropout(x, x[..., :3], dropout_p),
    "add_dropout of a branch": lambda x, dropout_p: functional.add_dropout(
        x, x, dropout_p, column_scale=torch.ones(3)
    ),
    "add_layer_norm": lambda x, **p: functional.add_layer_norm(x, x[..., :3], x.shape[-1:], **p),
    "add_rms_norm of a branch": lambda x, **p: functional.add_rms_norm(
        x, x, x.shape[-1:], column_scale=torch.ones(3), **p
    ),
    "linear": lambda x, **p: functional.linear(x, torch.ones(8, 3), **p),
    "attention": _attention,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_draws_nothing(name):
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"^\w+: \w+ must "):
        REFUSED[name](torch.ones(1, 2, 6, 8), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
