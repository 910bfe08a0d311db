"""Features of the input in another order (GPTQ), or with weights of 16 bits (LLM.int8); scales that
are quantised too (QLoRA)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass import functional, numerics
from onepass.nn import QuantizedLinear
from onepass.reference import quantized_linear as reference
from onepass.reference.products import quantize_rows
from onepass.reference.quantized_linear import Format
from tests.quantized_linear.cases import BF16, F16, F32, F64, results

OUT, IN = 48, 192
dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)


def order_and_columns():
    return torch.randperm(IN), torch.tensor([5, 100, 17], dtype=torch.int32)


def weight_with_outliers(columns) -> torch.Tensor:
    weight = torch.randn(OUT, IN)
    weight[:, columns.long()] *= 50
    return weight


@dtypes
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_values_and_gradients(dtype, weights, activation):
    """By the numerics rule, of few rows and of many, against the dequantised weight."""
    scales = F64 if dtype is F64 else None
    for rows in (2, 30):
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            order, columns = order_and_columns()
            layer = QuantizedLinear.from_weight(
                weight_with_outliers(columns), weights=weights, input_order=order,
                outlier_columns=columns, scales_dtype=scales,
            )  # fmt: skip
            weight = layer.dequantized(F64)
            tensors = [torch.randn(rows, IN), torch.randn(OUT), torch.randn(rows, OUT)]
            tensors = [tensor.to(dtype) for tensor in tensors]
            doutput = torch.randn(rows, OUT).to(dtype)

            def ours(input, bias, residual, layer=layer):
                return functional.quantized_linear(
                    input, layer.codes, layer.scales, layer.shifts, bias, weights=layer.weights,
                    activation=activation, residual=residual, input_order=layer.input_order,
                    outlier_columns=layer.outlier_columns, outliers=layer.outliers,
                )  # fmt: skip

            def formula(input, bias, residual, weight=weight):
                output = F.linear(input, weight.to(input.dtype), bias)
                return residual + (output if activation is None else F.gelu(output))

            ref, base = results(formula, tensors, doutput, F64), results(formula, tensors, doutput)
            found.append((results(ours, tensors, doutput), ref, base))
        for i, name in enumerate(("output", "dinput", "dbias", "dresidual")):
            of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
            numerics.assert_close(*map(list, of_draws), name)


def test_a_checkpoint_of_gptq():
    """weight[j][k] = scale[g][j] * (code[j][k] - zero[g][j]) with g = g_idx[k], exactly."""
    torch.manual_seed(0)
    groups = 6
    g_idx = torch.arange(groups).repeat_interleave(IN // groups)[torch.randperm(IN)]
    codes, zeros = torch.randint(0, 16, (OUT, IN)), torch.randint(0, 16, (groups, OUT))
    scales = torch.rand(groups, OUT).bfloat16().float()
    order = g_idx.argsort(stable=True)
    layer = QuantizedLinear(
        IN, OUT, False, weights="int4", group_size=32, scales_dtype=F32, input_order=order
    )
    words = reference.pack((codes[:, order] - 8).to(torch.int8), Format.INT4)
    state = layer.state_dict() | {
        "codes": words, "scales": scales, "shifts": scales * (8 - zeros),
        "input_order": order.to(torch.int32),
    }  # fmt: skip
    layer.load_state_dict(state)
    expected = scales[g_idx].t() * (codes - zeros[g_idx].t())
    # Scales of 8 bits times whole numbers below 16: nothing is rounded.
    assert torch.equal(layer.dequantized(), expected)
    x = torch.randn(7, IN)
    numerics.assert_close(layer(x), x.double() @ expected.double().t(), x @ expected.t(), "output")


def test_outliers_keep_their_digits_and_spare_the_rows():
    """With them the error is that of the other columns, of weights and of quantised input."""
    torch.manual_seed(0)
    _, columns = order_and_columns()
    weight, x = weight_with_outliers(columns), torch.randn(20, IN)
    x[:, columns.long()] *= 50
    expected = x @ weight.t()
    errors = {}
    for name, given in (("none", None), ("some", columns)):
        layer = QuantizedLinear.from_weight(weight, activations="int8", outlier_columns=given)
        errors[name] = float((layer(x) - expected).norm() / expected.norm())
        found = float((layer.dequantized() - weight).norm() / weight.norm())
        assert layer.error == pytest.approx(found, rel=0.05)
    assert torch.equal(layer.outliers, weight[:, columns.long()].half())
    assert errors["some"] < errors["none"] / 10
    rest = quantize_rows(x.index_fill(1, columns.long(), 0))
    of_codes = reference.dequantize(layer.codes, layer.scales, None, Format.INT8, IN)
    factors = rest, of_codes, x[:, columns.long()], layer.outliers

    def formula(rest, of_codes, outliers_of_x, outliers):
        return rest @ of_codes.t() + outliers_of_x @ outliers.t()

    ref, base = (formula(*(of.to(dtype) for of in factors)) for dtype in (F64, F32))
    numerics.assert_close(layer(x), ref, base, "output")
    x[3, 5] = float("inf")  # an outlier, which no code of 0 makes NaN
    assert not layer(x).isnan().any()


def test_a_row_does_not_depend_on_the_others():
    order, columns = order_and_columns()
    layer = QuantizedLinear.from_weight(
        torch.randn(OUT, IN), weights="nf4", input_order=order, outlier_columns=columns
    )
    x, threads = torch.randn(40, IN), torch.get_num_threads()
    few, many = layer(x[:1]), layer(x)
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            assert torch.equal(layer(x[:5])[:1], few) and torch.equal(layer(x[:20]), many[:20])
    finally:
        torch.set_num_threads(threads)


def test_modules_keep_load_and_show_them():
    order, columns = order_and_columns()
    features = dict(input_order=order, outlier_columns=columns)
    torch.manual_seed(0)
    own = QuantizedLinear.from_weight(torch.randn(OUT, IN), **features)
    other, plain = QuantizedLinear(IN, OUT, False, **features), QuantizedLinear(IN, OUT, False)
    names = {"input_order", "outlier_columns", "outliers"}
    assert names <= own.state_dict().keys() and not names & plain.state_dict().keys()
    x = torch.randn(4, IN)
    other.load_state_dict(own.state_dict())
    assert torch.equal(own(x), other(x)) and "input_order, outliers=3" in repr(other)
    assert other.double().outliers.dtype is F16
    with pytest.raises(RuntimeError, match="must have no input_order, got a state with it"):
        plain.load_state_dict(own.state_dict(), strict=False)
    state = own.state_dict() | {"input_order": torch.zeros(IN, dtype=torch.int32)}
    message = r"input_order must hold each of the 192 in_features once, got shape \(192,\) from 0"
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(state)
    compiled = torch.compile(own, fullgraph=True)
    torch.testing.assert_close(compiled(x), own(x))
    model = nn.Sequential(own, nn.ReLU())
    expected = own.dequantized()
    onepass.dequantize(model)
    assert torch.equal(model[0].weight, expected)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_verify_knows_them(activations):
    order, columns = order_and_columns()
    model = nn.Sequential(nn.Linear(IN, IN), nn.Linear(IN, 8))
    report = onepass.quantize(model, "int8", activations=activations)
    model[0] = QuantizedLinear.from_weight(
        weight_with_outliers(columns), activations=activations, input_order=order,
        outlier_columns=columns,
    )  # fmt: skip
    model[1] = nn.Linear(OUT, 8)
    assert report.verify(torch.randn(20, IN))


def test_messages():
    layer = QuantizedLinear(IN, OUT, False)
    given = dict(input=torch.randn(3, IN), codes=layer.codes, scales=layer.scales, weights="int8")
    wrong = {
        "input_order must have shape (192,), (in_features,), got (3,)": dict(
            input_order=torch.arange(3)
        ),
        "input_order must be int32 or int64 of one dimension, got shape (192,) of float32": dict(
            input_order=torch.ones(IN)
        ),
        "outliers must be given beside outlier_columns, got None": dict(
            outlier_columns=torch.arange(3)
        ),
        "outlier_columns must be given beside outliers, got None": dict(
            outliers=torch.ones(OUT, 3)
        ),
        "outliers must have shape (48, 3), (out_features, count), got (48, 2)": dict(
            outlier_columns=torch.arange(3), outliers=torch.ones(OUT, 2)
        ),
    }
    for message, of_call in wrong.items():
        with pytest.raises(RuntimeError) as error:
            functional.quantized_linear(**given | of_call)
        assert str(error.value) == f"quantized_linear: {message}"
    for name, features, rule in (
        ("input_order", torch.arange(IN - 1), "each of the 192 in_features once, got shape (191,)"),
        ("outlier_columns", torch.tensor([3, 192]), "some of the 192 in_features once, got"),
        ("outlier_columns", torch.tensor([3, 3]), "some of the 192 in_features once, got"),
    ):
        with pytest.raises(ValueError) as error:
            QuantizedLinear(IN, OUT, **{name: features})
        assert str(error.value).startswith(f"quantize: {name} must hold {rule}")


def test_scales_that_are_quantised_too():
    """Number by number, as QLoRA defines them; the last block is not full."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (600,), dtype=torch.uint8)
    codebook, scales, offset = torch.randn(256), torch.rand(3), 0.25
    found = reference.scales_of_codes(codes, codebook, scales, offset)
    expected = [float(codebook[int(c)]) * float(scales[i // 256]) + offset
                for i, c in enumerate(codes)]  # fmt: skip
    assert found.dtype is F32
    torch.testing.assert_close(found, torch.tensor(expected))
