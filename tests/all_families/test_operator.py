"""Declarations of operators; what they make is tested with each family."""

import traceback

import pytest
import torch

from onepass._ops import gate, linear, norm
from onepass._ops.autograd import _Writer
from onepass._ops.operator import Raw, written


def test_a_fake_may_not_ask_for_what_the_schema_lacks():
    def _outputs(gate, weight): ...

    with pytest.raises(TypeError, match="^gate_forward: _outputs must take some of gate, up, .*"):
        Raw("gate_forward", _outputs)


def test_a_definition_may_not_either():
    with pytest.raises(TypeError, match="got bias$"):
        Raw("gate_forward", lambda gate: None, lambda gate, bias: None)


def test_an_argument_of_the_backward_has_a_source():
    operators = Raw.all["norm_forward"], Raw.all["norm_backward"]
    with pytest.raises(TypeError, match="^norm_backward: x must be derived, got no function$"):
        _Writer(*operators, {}, None, "", {}, {}).source([], {})


def test_functions_take_values_by_name_in_any_order():
    raw = Raw.all["modulated_norm_forward"]
    take = raw.by_name(lambda shared, input, seed: (shared, input, seed))
    assert take("first", seed=3) == (False, "first", 3)


def test_keywords_are_those_that_are_given():
    take = Raw.all["attention_forward"].by_name(lambda query, **given: given)
    assert take("q", "k", scale=1.0) == {"key": "k", "scale": 1.0}


def test_the_source_is_what_runs():
    assert "return forward_op(gate, up, activation_kind, gate_last)" in gate._gate.source
    assert "is_one = needs[0] and needs[1]" in norm._norm.source


def test_a_function_saves_what_its_backward_reads():
    """Always, or where the declaration says so."""
    assert "weight_offset, dropout_p, out_dtype, residual_dtype, True)" in norm._norm.source
    source = linear._epilogue.source
    assert "activation_kind, factor_mask, save_preactivation or (activation_kind" in source
    assert (
        "return forward_op(input, weight, bias, residual, seed, dropout_p, activation_kind, "
        "save_preactivation, factor_mask, rounding_seed)" in source
    )


def test_an_operator_that_writes_into_its_arguments_is_refused_under_vmap():
    raw = Raw.all["rotary_forward_inplace"]
    assert raw.constants == ["rotary_dim", "interleaved", "eps", "weight_offset"]
    x, table = torch.ones(2, 1, 1, 2, 2), torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="rotary_forward_inplace"):
        torch.vmap(lambda x: raw(x, None, table, table, None, 2, True))(x)


def test_tracebacks_show_the_source():
    module = written("a_test", "def fail(x):\n    return x.nothing\n")
    with pytest.raises(AttributeError) as caught:
        module.fail(torch.ones(1))
    assert "return x.nothing" in "".join(traceback.format_exception(caught.value))
