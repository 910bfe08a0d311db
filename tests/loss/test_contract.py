"""Every message of both losses, with data and without; and the promises of a gradient in place."""

import pytest
import torch
import torch.nn.functional as F

from onepass import functional
from onepass.nn import CrossEntropyLoss
from tests.loss.cases import RAW, make, results
from tests.support.allocations import allocated
from tests.support.dtypes import BF16, F32, F64

ce, lce = functional.cross_entropy, functional.linear_cross_entropy


def refused(op, given: dict, wrong: dict[str, dict], name: str) -> None:
    """wrong: by message, the arguments that cause it."""
    op(**given)
    for message, changes in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{name}: {message}"):
            op(**(given | changes))


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_messages(name):
    """Those without data are in all_families/test_messages.py."""
    has_layer = name == "linear_cross_entropy"
    classes = 9 if has_layer else 6
    x, ones, layer = torch.randn(4, 6), torch.ones(classes), torch.ones(9, 6)
    target = torch.zeros(4, dtype=torch.int64)
    shape = (
        r"input must have shape \(in_features,\) or \(rows, in_features\), other dimensions "
        r"being flattened, got"
        if has_layer
        else r"input must have shape \(classes,\) or \(rows, classes\), other dimensions being "
        r"flattened, got"
    )
    of_target = (
        r"target must have dtype int64, indices of classes \(torch.nn.functional.cross_entropy "
        r"takes their probabilities\), got"
    )
    beside = "must have dtype float32, bfloat16 or float16 beside input, got float64"
    of_weight = rf"weight must have shape \({classes},\), got"
    cap = "softcap must be 0 or a positive number that float32 holds, got"
    smoothing = "label_smoothing must lie between 0 and 1, got"
    wide = {"input": x.double()} | ({"linear_weight": layer.double()} if has_layer else {})
    wrong = {
        rf"{shape} \(2, 2, 6\)": {"input": x.view(2, 2, 6)},
        rf"{shape} \(\)": {"input": x[0, 0], "target": target[0]},
        r"target must have shape \(4,\), got \(3,\)": {"target": target[:3]},
        r"target must have shape \(4,\), got \(4, 1\)": {"target": target[:, None]},
        r"target must have shape \(\), got \(1,\)": {"input": x[0], "target": target[:1]},
        f"{of_target} float32": {"target": x},
        f"{of_target} float64": {"target": target.double(), "weight": ones},
        "input must have dtype float32, bfloat16, float16 or float64, got i": {"input": x.long()},
        rf"{of_weight} \(5,\)": {"weight": ones[:5]},
        # Before its numbers are looked up.
        rf"{of_weight} \(4,\)": {"target": target + classes - 1, "weight": ones[:4]},
        rf"{of_weight} \(\)": {"weight": ones[0]},
        f"weight {beside}": {"weight": ones.double()},
        "weight must have dtype float64 like input, got float32": wide | {"weight": ones},
        f"{smoothing} 1.5": {"label_smoothing": 1.5},
        f"{smoothing} nan": {"label_smoothing": float("nan")},
        f"{cap} -1": {"softcap": -1.0},
        f"{cap} 1e\\+300": {"softcap": 1e300},
        "z_loss must be finite, got inf": {"z_loss": float("inf")},
    }
    given, op, tensors = {"input": x, "target": target}, ce, {"weight": ones, "target": target}
    if has_layer:
        given, op = given | {"linear_weight": layer}, lce
        tensors |= {"linear_weight": layer, "linear_bias": ones}
        of_layer = r"linear_weight must have shape \(classes, 6\), got"
        wrong |= {
            rf"{of_layer} \(9, 5\)": {"linear_weight": layer[:, :5]},
            rf"{of_layer} \(6,\)": {"linear_weight": layer[0]},
            rf"{of_layer} \(\)": {"linear_weight": layer[0, 0], "weight": ones},
            f"linear_weight {beside}": {"linear_weight": layer.double()},
            r"linear_bias must have shape \(9,\), got \(8,\)": {"linear_bias": ones[:8]},
            f"linear_bias {beside}": {"linear_bias": ones.double()},
        }
    for argument, tensor in tensors.items():
        there = {"weight": ones} | {argument: tensor.to("meta")}
        wrong[f"{argument} must be on the device of input"] = there
    refused(op, given, wrong, name)


@pytest.mark.parametrize("wrong", [6, -1, -99, 2**40])
@pytest.mark.parametrize("row", [0, 3])
def test_targets_that_are_no_class(row, wrong):
    x, target, layer = torch.randn(4, 6), torch.tensor([0, 5, -100, 2]), torch.randn(6, 6)
    target[row] = wrong
    message = f"target must lie between 0 and 5 or be ignore_index, -100, got {wrong}"
    for options in ({}, {"weight": torch.ones(6)}):
        with pytest.raises(RuntimeError, match=f"^cross_entropy: {message}"):
            ce(x, target, **options)
        with pytest.raises(RuntimeError, match=f"^linear_cross_entropy: {message}"):
            lce(x, layer, target, **options)
    with pytest.raises(IndexError):
        F.cross_entropy(x, target)


def test_targets_that_are_no_class_on_cuda(cuda):
    """The host does not check them: loss and gradient are NaN, and no other memory is read."""
    case = make(4, 6, reduction="none")
    case.target[1], case.target[2] = 6, -7
    found = results(case.ours, case)
    assert found["loss"].isnan().tolist() == [False, True, True, False]
    assert found["dinput"].isnan().any(1).tolist() == [False, True, True, False]
    assert found["dinput"][1:3].isnan().all()
    mean = make(4, 6)
    mean.target[1] = 6
    found = results(mean.ours, mean)
    assert found["loss"].isnan() and found["dinput"][:3].isnan().all()


CALL = dict(
    input=torch.randn(3, 5), target=torch.tensor([0, 4, 1]), weight=None, ignore_index=-100,
    label_smoothing=0.0, softcap=0.0, reduction_kind=1,
)  # fmt: skip
KIND = "reduction_kind must be one of 0 to 2, got"


@pytest.mark.parametrize("op", [RAW.loss_forward, RAW.loss_forward_check])
def test_messages_of_raw_forwards(op):
    wrong = {
        f"{KIND} 3": {"reduction_kind": 3},
        f"{KIND} -1": {"reduction_kind": -1},
        "weight must have dtype float32, got float16": {"weight": torch.ones(5).half()},
        "input must be given, got none": {"input": None},
        "target must be given, got none": {"target": None},
        "out_dtype must have dtype float32, bfloat16 or float16": {"out_dtype": F64},
        "out_dtype must have dtype float32, bfloat16, float16 or": {"out_dtype": torch.int8},
    }
    refused(op, CALL | {"z_loss": 0.0, "out_dtype": None}, wrong, "cross_entropy")


@pytest.mark.parametrize("check", ["", "_check"])
@pytest.mark.parametrize("name", ["backward", "backward_inplace"])
def test_messages_of_raw_backwards(name, check):
    given = CALL | {"input": torch.randn(3, 5)}
    _, statistics, total_weight = RAW.loss_forward(**given, z_loss=0.0, out_dtype=None)
    given |= {"dloss": torch.ones(()), "statistics": statistics, "total_weight": total_weight}
    wrong = {
        f"{KIND} 3": {"reduction_kind": 3},
        r"dloss must have shape \(\), got \(3,\)": {"dloss": torch.ones(3)},
        "dloss must have dtype float32, bfloat16 or": {"dloss": torch.ones(()).double()},
        "dloss must be on the device of input": {"dloss": torch.ones((), device="meta")},
        r"statistics must have shape \(3, 3\), got \(3, 4\)": {"statistics": torch.ones(3, 4)},
        "statistics must have dtype float32, got fl": {"statistics": torch.ones(3, 3).half()},
        r"total_weight must have shape \(\), got \(0,\)": {"total_weight": torch.ones(0)},
        "total_weight must have dtype float32, got": {"total_weight": torch.ones(()).half()},
        "label_smoothing must lie between 0 and 1, got -0.1": {"label_smoothing": -0.1},
    }
    refused(getattr(RAW, f"loss_{name}{check}"), given, wrong, f"cross_entropy_{name}")


@pytest.mark.parametrize("op", [RAW.linear_loss, RAW.linear_loss_check])
def test_messages_of_the_raw_operator_with_a_layer(op):
    given = {name: value for name, value in CALL.items() if name != "reduction_kind"}
    given |= {"linear_weight": torch.randn(5, 5), "linear_bias": None, "z_loss": 0.0}
    wrong = {
        "gradient_mask must be one of 0 to 7, got 8": {"gradient_mask": 8},
        "gradient_mask must be one of 0 to 7, got -1": {"gradient_mask": -1},
        "dloss must be given for gradients and only then, got one": {"gradient_mask": 0},
        "dloss must be given for gradients and only then, got none": {"dloss": None},
        r"dloss must have shape \(3,\), got \(\)": {"dloss": torch.ones(())},
        "weight must have dtype float32, got float16": {"weight": torch.ones(5).half()},
        "input must be given, got none": {"input": None},
        "linear_weight must be given, got none": {"linear_weight": None},
        "target must be given, got none": {"target": None},
    }
    given |= {"dloss": torch.ones(3), "gradient_mask": 7}
    refused(op, given, wrong, "linear_cross_entropy")


def test_python_arguments():
    x, target, layer = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64), torch.ones(4, 4)
    kinds = "reduction must be one of 'none', 'mean', 'sum', got 'x'"
    with pytest.raises(ValueError, match=kinds):
        ce(x, target, reduction="x")
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: {kinds}"):
        lce(x, layer, target, reduction="x")
    with pytest.raises(TypeError, match="cross_entropy: inplace_backward must be True or False"):
        ce(x, target, inplace_backward=1)
    weight = torch.ones(4, requires_grad=True)
    message = "weight must not require a gradient, got one that"
    for logits in (x, x.clone().requires_grad_()):
        with pytest.raises(RuntimeError, match=message):
            ce(logits, target, weight)
        with pytest.raises(RuntimeError, match=f"^linear_cross_entropy: {message}"):
            lce(logits, layer, target, weight=weight)
    with torch.no_grad():
        ce(x, target, weight)


# ---- gradients in place --------------------------------------------------------------------------


def result_of(x):
    """The same numbers as an operator's result, which may be written in place."""
    return x.requires_grad_() * 1.0


def test_a_gradient_in_place_of_a_leaf_is_refused():
    """Views of leaves: all_families/test_inplace.py. Without a backward nothing is written."""
    leaf, target = torch.nn.Parameter(torch.randn(3, 5)), torch.arange(3)
    before = leaf.detach().clone()
    message = "cross_entropy: input must be the result of an operator to be written in place where "
    with pytest.raises(RuntimeError, match=message + "a gradient is required, got a leaf$"):
        CrossEntropyLoss(inplace_backward=True)(leaf, target)
    with torch.no_grad():
        ce(leaf, target, inplace_backward=True)
    ce(leaf.detach(), target, inplace_backward=True)
    assert torch.equal(leaf, before)


def test_gradients_in_place_of_parts_of_a_result():
    """Views that torch lets nobody write to are no obstacle: the graph stays as it is."""
    leaf = torch.randn(4, 10, requires_grad=True)
    target, found = torch.tensor([0, 4, 1, 2]), []
    for inplace in (False, True):
        part = (leaf * 1.0).chunk(2, dim=1)[0]
        found += torch.autograd.grad(ce(part, target, inplace_backward=inplace), leaf)
    assert torch.equal(*found)


@pytest.mark.parametrize("view", ["expanded", "transposed", "overlapping"])
def test_a_gradient_in_place_needs_rows_of_its_own(view):
    x = {
        "expanded": result_of(torch.randn(1, 5)).expand(3, 5),
        "transposed": result_of(torch.randn(5, 3)).t(),
        "overlapping": result_of(torch.randn(9)).as_strided((3, 5), (2, 1)),
    }[view]
    before = x.detach().clone()
    loss = ce(x, torch.tensor([0, 4, 1]), inplace_backward=True)
    message = "input must have dense rows that do not overlap, got strides"
    with pytest.raises(RuntimeError, match=f"^cross_entropy_backward_inplace: {message}"):
        loss.backward()
    assert torch.equal(x, before)


def backwards():
    """(a layer, its logits, targets), for gradients in place of the logits."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 40)
    return layer, layer(torch.randn(6, 8)), torch.arange(6)


CHANGED = "modified by an inplace operation"


@pytest.mark.parametrize("how", ["a second backward", "two losses", "both in place", "changed"])
def test_overwritten_logits_raise(how):
    _, logits, target = backwards()
    second = ce(logits, target, inplace_backward=how == "both in place")
    loss = ce(logits, target, inplace_backward=True)
    if how == "a second backward":
        loss.backward(retain_graph=True)
    elif how == "changed":
        with torch.no_grad():
            logits.add_(1)
    else:
        loss = loss + second  # autograd begins with the newest
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@pytest.mark.parametrize("function", [torch.exp, torch.square, F.log_softmax, torch.sum])
def test_other_uses_of_the_logits(function):
    """Right numbers or an error, in either order of the gradients."""
    expected = None
    for inplace in (False, True):
        layer, logits, target = backwards()
        args = (-1,) if function is F.log_softmax else ()
        other = function(logits, *args).sum()
        try:
            (ce(logits, target, inplace_backward=inplace) + other).backward()
        except RuntimeError as error:
            assert inplace and CHANGED in str(error)
            continue
        if expected is None:
            expected = layer.weight.grad
        assert torch.equal(layer.weight.grad, expected)


def test_second_derivatives_in_place_are_refused():
    _, logits, target = backwards()
    before = logits.detach().clone()
    loss = ce(logits, target, inplace_backward=True)
    message = "cross_entropy: inplace_backward must be False with create_graph=True, got True"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(loss, logits, create_graph=True)
    assert torch.equal(logits, before)


def test_memory_of_a_gradient_in_place():
    """The logits and little more: all allocations of a step are added up."""
    share = {}
    for dtype in (F32, BF16):
        for inplace in (True, False):
            logits = result_of(torch.randn(64, 5003).to(dtype))
            target = torch.randint(5003, (64,))

            def step(logits, target, inplace=inplace):
                torch.autograd.grad(ce(logits, target, inplace_backward=inplace), logits)

            share[inplace] = allocated(step, logits, target) / logits.nbytes
        assert share[True] < 0.01 < 1.0 <= share[False] < 1.01, share
