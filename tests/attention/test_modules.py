"""MultiheadAttention and the transformer layers against torch's: same arguments, same numbers."""

import copy
import itertools

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics

BATCH, SEQ, KEYS, WIDTH, HEADS = 2, 7, 5, 12, 3
INF = float("inf")


def attentions_in(calls) -> int:
    return sum(call["op"].startswith("attention") for call in calls)


def pair(cls_name: str, *args, **options) -> tuple[nn.Module, nn.Module]:
    """(onepass's module, torch's) with the same parameters, random where torch has zeros."""
    ours = getattr(onepass.nn, cls_name)(*args, **options)
    stock = getattr(nn, cls_name)(*args, **options)
    for parameter in stock.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.3)
    ours.load_state_dict(stock.state_dict())
    return ours, stock


def run(module, tensors, gradient=None, **arguments):
    """(output, weights if it returns any, gradients of the distinct inputs and of all parameters,
    None if there is none)."""
    leaves = {id(x): x.detach().clone().requires_grad_() for x in tensors}
    found = module(*(leaves[id(x)] for x in tensors), **arguments)
    output, *weights = found if isinstance(found, tuple) else (found,)
    weights = [x for x in weights if x is not None]
    upstream = [torch.ones_like(output) if gradient is None else gradient.to(output)]
    upstream += [torch.linspace(-1, 1, x.numel()).to(x).view_as(x) for x in weights]
    outputs, wanted = [output, *weights], [*leaves.values(), *module.parameters()]
    return *outputs, *torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)


def assert_same(ours, stock) -> None:
    """By the numerics rule for float64: within 1e-11 of the largest number."""
    assert len(ours) == len(stock)
    for index, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert (a is None) == (b is None), index
        if a is not None:
            assert a.dtype == b.dtype == torch.float64
            numerics.assert_close(a, b, b, str(index))


def assert_close(runs) -> None:
    """By the numerics rule: draws of onepass's results, of torch's in float64, and of torch's."""
    for index in range(len(runs[0][0])):
        pooled = ([results[index] for results in column] for column in zip(*runs, strict=True))
        numerics.assert_close(*pooled, str(index))


# ---------------------------------------------------------------- values and gradients

# Every form of the inputs with every form of the projections. Masks have a test of their own; both
# have cases with columns for extra keys.
INPUTS = ("self", "key is value", "all different")
OPTIONS = [
    dict(zip(("bias", "add_bias_kv", "add_zero_attn", "batch_first"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=4)
]


def draw(inputs: str, batch_first: bool, batched: bool = True, kdim=WIDTH, vdim=WIDTH, keys=KEYS):
    def tensor(seq, width):
        shape = ((BATCH, seq) if batch_first else (seq, BATCH)) if batched else (seq,)
        return torch.randn(*shape, width, dtype=torch.float64)

    query = tensor(SEQ, WIDTH)
    if inputs == "self":
        return query, query, query
    key = tensor(keys, kdim)
    return query, key, key if inputs == "key is value" else tensor(keys, vdim)


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("inputs", [*INPUTS, "other widths"])
def test_every_projection(inputs, batched):
    widths = dict(kdim=8, vdim=10) if inputs == "other widths" else {}
    for options in OPTIONS:
        ours, stock = pair("MultiheadAttention", WIDTH, HEADS, **widths, **options)
        tensors = draw(inputs, options["batch_first"], batched, **widths)
        with onepass._dispatch_log.record() as calls:
            y, weights = ours.double()(*tensors, need_weights=False)
        assert attentions_in(calls) == 1 and weights is None and y.is_contiguous()
        gradient = torch.randn_like(y)
        results = [run(m.double(), tensors, gradient, need_weights=False) for m in (ours, stock)]
        assert_same(*results)


def masks(keys: int, entries: int):
    """(name, key_padding_mask, attn_mask): every kind of either, and of both together."""
    padding = torch.rand(BATCH, keys) < 0.4
    flat, full = torch.rand(SEQ, keys) < 0.4, torch.rand(entries, SEQ, keys) < 0.4
    for mask in (padding, flat, full):
        mask[..., 0] = False

    def as_float(mask):
        return torch.randn(mask.shape).double().masked_fill(mask, -INF)

    paddings = {"": None, "bool": padding, "float": as_float(padding)}
    others = {"": None, "bool 2-D": flat, "bool 3-D": full}
    others |= {"float 2-D": as_float(flat), "float 3-D": as_float(full)}
    for (a, one), (b, other) in itertools.product(paddings.items(), others.items()):
        yield f"{a}, {b}", one, other


@pytest.mark.parametrize("extra", [{}, dict(add_bias_kv=True, add_zero_attn=True)], ids=str)
@pytest.mark.parametrize("batch_first", [True, False, None])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_every_mask(extra, batch_first, need_weights):
    """None: without a batch. Weights are averaged over heads, or not, by turns; where they are
    returned, dropout draws torch's."""
    batched, options = batch_first is not None, {"batch_first": bool(batch_first), **extra}
    options["dropout"] = 0.3 * need_weights
    ours, stock = pair("MultiheadAttention", WIDTH, HEADS, **options)
    tensors = draw("key is value", bool(batch_first), batched)
    of_each = masks(KEYS, BATCH * HEADS if batched else HEADS)
    for number, (name, padding, attn_mask) in enumerate(of_each):
        padding = padding if batched or padding is None else padding[1]
        arguments = dict(key_padding_mask=padding, attn_mask=attn_mask, need_weights=need_weights)
        arguments |= dict(average_attn_weights=number % 2 > 0)
        results = []
        for module in (ours, stock):
            torch.manual_seed(2)
            with onepass._dispatch_log.record() as calls:
                results.append(run(module.double(), tensors, **arguments))
            assert need_weights or module is stock or attentions_in(calls) == 2, name
            if need_weights and padding is attn_mask is None:  # served by torch
                assert not calls
        assert_same(*results)


@pytest.mark.parametrize("empty", ["sequence", "row"])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_rows_without_keys_are_zero_and_so_are_their_gradients(empty, form):
    """torch has NaN there, in the gradients of all parameters too."""
    mask = torch.zeros((BATCH if empty == "sequence" else SEQ), SEQ, dtype=torch.bool)
    mask[0] = True
    name, dead = "attn_mask", (slice(None), 0)
    if empty == "sequence":
        name, dead = "key_padding_mask", (0,)
    exact = onepass.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    x, found = torch.randn(BATCH, SEQ, WIDTH), []
    for dtype, need_weights in (
        (torch.float32, True), (torch.float32, False), (torch.float64, False),
    ):  # fmt: skip
        made = copy.deepcopy(exact).to(dtype)
        given = mask if form == "bool" else torch.zeros_like(mask, dtype=dtype)
        given = given if form == "bool" else given.masked_fill(mask, -INF)
        leaf = x.to(dtype).requires_grad_()
        y, weights = made(leaf, leaf, leaf, need_weights=need_weights, **{name: given})
        if need_weights:
            assert not weights[dead].any() and weights.isfinite().all()
        assert torch.equal(y[dead], made.out_proj.bias.expand_as(y[dead]))
        found.append(torch.autograd.grad(y.square().sum(), [leaf, *made.parameters()]))
    for ours, base, ref in zip(*found, strict=True):
        numerics.assert_close(ours, ref, base)


def test_masks_get_their_gradients():
    tensors, gradients = draw("self", False), []
    for module in pair("MultiheadAttention", WIDTH, HEADS):
        masks = [torch.full(size, 0.2).double() for size in ((SEQ, SEQ), (BATCH, SEQ))]
        bias, padding = (mask.requires_grad_() for mask in masks)
        arguments = dict(attn_mask=bias, key_padding_mask=padding, need_weights=False)
        y, _ = module.double()(*tensors, **arguments)
        gradients.append(torch.autograd.grad(y.square().sum(), (bias, padding)))
    assert_same(*gradients)


@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
@pytest.mark.parametrize("extra", [{}, dict(add_zero_attn=True)], ids=["", "zero key"])
@pytest.mark.parametrize("keys", [SEQ, KEYS])
def test_causal_hint(keys, extra, padded):
    """Of as many keys as queries, and of fewer."""
    ours, stock = pair("MultiheadAttention", WIDTH, HEADS, batch_first=True, **extra)
    causal = torch.ones(SEQ, keys, dtype=torch.bool).triu(1 if keys == SEQ else keys - SEQ + 2)
    arguments = dict(attn_mask=causal, is_causal=True, need_weights=False)
    if padded:
        arguments["key_padding_mask"] = torch.arange(keys) > torch.tensor([[keys - 3], [6]])
    tensors = draw("key is value", True, keys=keys)
    assert_same(*(run(module.double(), tensors, **arguments) for module in (ours, stock)))


def test_causal_hint_is_taken_at_its_word():
    ours, _ = pair("MultiheadAttention", WIDTH, HEADS, batch_first=True)
    x, hint = torch.randn(BATCH, SEQ, WIDTH), dict(attn_mask=torch.zeros(SEQ, SEQ), is_causal=True)
    later = torch.cat((x[:, :-1], torch.randn(BATCH, 1, WIDTH)), 1)
    with onepass._dispatch_log.record() as calls:
        y, z = (ours(x, x, x, **hint, need_weights=False)[0][:, :-1] for x in (x, later))
    assert attentions_in(calls) == 2 and torch.equal(y, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_numerics_rule(dtype, masked):
    options = dict(batch_first=True, dtype=dtype)
    ours, stock = pair("MultiheadAttention", 64, 4, **options)
    exact = copy.deepcopy(stock).double()
    drawn = [(torch.randn(2, 33, 64).to(dtype), torch.randn(2, 33, 64)) for _ in range(4)]
    arguments = dict(need_weights=False)
    if masked:
        arguments["key_padding_mask"] = torch.arange(33) > torch.tensor([[20], [40]])
    modules = ((ours, dtype), (exact, torch.float64), (stock, dtype))
    runs = [
        [run(module, (x.to(cast),) * 3, dy, **arguments) for module, cast in modules]
        for x, dy in drawn
    ]
    assert_close(runs)


# ---------------------------------------------------------------- torch's own path, and its errors


X = torch.randn(BATCH, SEQ, WIDTH)
NOT_TAKEN = {
    "1-D": ((X[0, 0],) * 3, {}),
    "4-D": ((X[None],) * 3, {}),
    "mixed dimensions": ((X, X[0], X[0]), {}),
    "width": ((X[..., :-1],) * 3, {}),
    "key width": ((X, X[..., :-1], X[..., :-1]), {}),
    "value's length": ((X, X, X[:, :-1]), {}),
    "batch": ((X, X[:1], X[:1]), {}),
    "integer mask": ((X, X, X), dict(attn_mask=torch.zeros(SEQ, SEQ, dtype=torch.int64))),
    "integer padding": ((X, X, X), dict(key_padding_mask=torch.zeros(BATCH, SEQ).long())),
    "mask's shape": ((X, X, X), dict(attn_mask=torch.zeros(SEQ, SEQ - 1))),
    "mask's heads": ((X, X, X), dict(attn_mask=torch.zeros(BATCH, SEQ, SEQ))),
    "mask's dimensions": ((X, X, X), dict(attn_mask=torch.zeros(SEQ))),
    "padding's shape": ((X, X, X), dict(key_padding_mask=torch.zeros(BATCH, SEQ + 1))),
    "padding's batch": ((X, X, X), dict(key_padding_mask=torch.zeros(SEQ))),
    "hint without a mask": ((X, X, X), dict(is_causal=True)),
    "unbatched mask's heads": ((X[0],) * 3, dict(attn_mask=torch.zeros(2, SEQ, SEQ))),
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_torch_refuses_is_refused_in_its_words(case):
    tensors, arguments = NOT_TAKEN[case]
    ours, stock = pair("MultiheadAttention", WIDTH, HEADS, batch_first=True)
    with pytest.raises(Exception) as expected:
        stock(*tensors, need_weights=False, **arguments)
    with pytest.raises(type(expected.value)) as got:
        ours(*tensors, need_weights=False, **arguments)
    assert str(got.value) == str(expected.value)


def test_mixed_masks_warn_as_torch():
    ours, stock = pair("MultiheadAttention", WIDTH, HEADS, batch_first=True)
    masks = dict(key_padding_mask=torch.zeros(BATCH, SEQ).bool(), attn_mask=torch.zeros(SEQ, SEQ))
    texts = []
    for module in (ours, stock):
        with pytest.warns(UserWarning) as caught:
            module(X, X, X, **masks, need_weights=False)
        texts.append(str(caught[0].message))
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- class and state of an instance


def test_layers_are_made_of_onepass(torchs_products):
    decoder = onepass.nn.TransformerDecoderLayer(8, 2, 16)
    own = {type(part) for part in decoder.children()} - {nn.Linear}
    assert own == {onepass.nn.MultiheadAttention, onepass.nn.LayerNorm, onepass.nn.Dropout}
    report = onepass.swap(nn.ModuleList([decoder, onepass.nn.TransformerEncoderLayer(8, 2, 16)]))
    assert not (report.swapped or report.skipped or report.unknown)


# ---------------------------------------------------------------- dropout


def test_dropout_drops_weights_and_keeps_their_mean():
    heads, width = 4, 64
    ours = onepass.nn.MultiheadAttention(width, heads, dropout=0.25, batch_first=True)
    with torch.no_grad():  # weights are 1 / keys, and the output is how many of them were kept
        ours.in_proj_weight.zero_()
        ours.in_proj_bias.copy_(torch.cat((torch.zeros(2 * width), torch.ones(width))))
        ours.out_proj.weight.copy_(torch.eye(width))
        ours.out_proj.bias.zero_()
    x = torch.randn(4, 128, width)
    y = ours(x, x, x, need_weights=False)[0]
    # 4 * 128 rows and 4 heads of 128 keys each: the mean's standard deviation is 0.0011.
    assert abs(y.mean().item() - 1.0) < 0.006
    kept = (y * 0.75 * 128).round()
    torch.testing.assert_close(kept / (0.75 * 128), y)
    assert torch.allclose(ours.eval()(x, x, x, need_weights=False)[0], torch.ones(4, 128, width))


# ---------------------------------------------------------------- the layers

LAYERS = [
    {},
    {"norm_first": True},
    {"activation": "gelu", "bias": False},
    {"batch_first": False, "layer_norm_eps": 1e-3},
]


def encoder_masks(dtype=torch.float32):
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    padding = torch.arange(SEQ) > torch.tensor([[4], [6]])
    as_float = torch.zeros(SEQ, SEQ, dtype=dtype).masked_fill(causal, -INF)
    return [
        {},
        dict(src_mask=causal),
        dict(src_mask=as_float, is_causal=True),
        dict(src_key_padding_mask=padding),
        dict(src_mask=causal, src_key_padding_mask=padding),
        dict(src_mask=causal, src_key_padding_mask=padding, is_causal=True),
    ]


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_encoder_layer(options, mode):
    options = {"batch_first": True, **options}
    ours, stock = pair("TransformerEncoderLayer", WIDTH, HEADS + 1, 24, 0.0, **options)
    exact = copy.deepcopy(stock).double()
    shape = (BATCH, SEQ, WIDTH) if options["batch_first"] else (SEQ, BATCH, WIDTH)
    x = torch.randn(shape)
    runs = []
    for arguments, wide in zip(encoder_masks(), encoder_masks(torch.float64), strict=True):
        results = []
        for module in (ours, exact, stock):
            module.train(mode == "train")
            of, masks = (x.double(), wide) if module is exact else (x, arguments)
            with onepass._dispatch_log.record() as calls:
                if mode == "no_grad":
                    with torch.no_grad():
                        results.append([module(of, **masks)])
                else:
                    results.append(run(module, (of,), **masks))
            if module is ours:
                assert attentions_in(calls) == (1 if mode == "no_grad" else 2)
                assert sum("layer_norm" in call["op"] for call in calls) >= 2
        runs.append(results)
    assert_close(runs)


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_decoder_layer(options):
    options = {"batch_first": True, **options}
    ours, stock = pair("TransformerDecoderLayer", WIDTH, HEADS, 24, 0.0, **options)
    x, memory, _ = draw("all different", options["batch_first"])
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    for arguments in (
        {},
        dict(tgt_mask=causal, tgt_is_causal=True),
        dict(
            tgt_mask=causal,
            memory_mask=torch.rand(SEQ, KEYS) < 0.3,
            memory_key_padding_mask=torch.arange(KEYS) > torch.tensor([[2], [4]]),
        ),
    ):
        with onepass._dispatch_log.record() as calls:
            results = [run(ours.double(), (x, memory), **arguments)]
        assert attentions_in(calls) == 4
        results.append(run(stock.double(), (x, memory), **arguments))
        assert_same(*results)


# ---------------------------------------------------------------- nested
quiet = pytest.mark.filterwarnings("ignore:.*nested tensor", "ignore:enable_nested_tensor")


@quiet
def test_nested_rows_are_packed_not_padded():
    layer = onepass.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    rows = [torch.randn(length, 16) for length in (4, 1, 7)]
    seen = []
    layer.linear1.register_forward_hook(lambda _, args, y: seen.append(tuple(args[0].shape)))
    y = layer(torch.nested.nested_tensor(rows))
    assert seen == [(12, 16)]
    for ours, row in zip(y.unbind(), rows, strict=True):
        torch.testing.assert_close(ours, layer(row[None])[0])
    attention = layer.self_attn
    nested = torch.nested.nested_tensor(rows)
    y = attention(nested, nested, nested, need_weights=False)[0]
    for ours, row in zip(y.unbind(), rows, strict=True):
        one = attention(row[None], row[None], row[None], need_weights=False)[0][0]
        torch.testing.assert_close(ours, one)


@quiet
def test_nested_tensors_that_torch_refuses():
    layer = onepass.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(3, 16)])
    other = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(3, 16)])
    with pytest.raises(AssertionError, match="does not support NestedTensor"):
        layer.self_attn(nested, other, other, need_weights=False)
    with pytest.raises(AssertionError, match="does not support NestedTensor"):
        layer(nested, src_mask=torch.zeros(3, 3))


# ---------------------------------------------------------------- torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_dtypes_of_stock(dtype):
    ours, stock = pair("TransformerEncoderLayer", 16, 2, 32, 0.0, batch_first=True)
    exact, x = copy.deepcopy(stock).double(), torch.randn(BATCH, SEQ, 16)
    for arguments, wide in zip(encoder_masks(), encoder_masks(torch.float64), strict=True):
        with torch.autocast("cpu", dtype=dtype):
            a, b = ours(x, **arguments), stock(x, **arguments)
            assert a.dtype == b.dtype
            assert ours.self_attn(x, x, x, need_weights=False)[0].dtype == dtype
        numerics.assert_close(a, exact(x.double(), **wide), b)


def test_compile_fullgraph_with_dynamic_lengths():
    """Of the module's own code: all_families compiles the operators to the end."""
    torch._dynamo.reset()
    layer = onepass.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for seq in (5, 9):
        x = torch.randn(2, seq, 16)
        mask = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        padding = torch.arange(seq) > torch.tensor([[2], [seq]])
        gradients = []
        for module in (layer, compiled):
            torch.manual_seed(5)
            y = module(x, src_mask=mask, src_key_padding_mask=padding)
            gradients.append((y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)


def test_nothing_is_copied_on_the_way_in():
    """Projections are read in place, and the output has the wanted order."""
    attention = onepass.nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
    x = torch.randn(2, 7, 16)
    with torch.autograd.profiler.profile() as profile, torch.no_grad():
        attention(x, x, x, need_weights=False)
    names = {event.name for event in profile.function_events}
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::cat"}
