"""Every message, with data and without; and the promises of a gradient in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onepass import functional
from onepass.nn import CrossEntropyLoss
from tests.attention_decode.test_torch import allocated
from tests.loss.cases import BF16, F32, F64, RAW, make, results

OP = "cross_entropy"


def check_messages(device: str, devices: bool = True):
    x = torch.randn(4, 6, device=device)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    weight = torch.ones(6, device=device)
    shape = (
        r"input must have shape \(classes,\) or \(rows, classes\), other dimensions being "
        r"flattened"
    )
    wrong = {
        rf"{shape}, got \(2, 2, 6\)": lambda: ce(x.view(2, 2, 6), target.view(2, 2)),
        rf"{shape}, got \(\)": lambda: ce(x[0, 0], target[0]),
        r"target must have shape \(4,\), got \(3,\)": lambda: ce(x, target[:3]),
        r"target must have shape \(4,\), got \(4, 1\)": lambda: ce(x, target[:, None]),
        r"target must have shape \(\), got \(1,\)": lambda: ce(x[0], target[:1]),
        r"target must have dtype int64, indices of classes \(torch.nn.functional.cross_entropy "
        r"takes their probabilities\), got float32": lambda: ce(x, x),
        "target must have dtype int64, .*, got int32": lambda: ce(x, target.int()),
        "input must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: ce(x.long(), target)
        ),
        r"weight must have shape \(6,\), got \(5,\)": lambda: ce(x, target, weight[:5]),
        "weight must have dtype float32, bfloat16 or float16 beside input, got float64": (
            lambda: ce(x, target, weight.double())
        ),
        "weight must have dtype float64 like input, got float32": (
            lambda: ce(x.double(), target, weight)
        ),
        "label_smoothing must lie between 0 and 1, got 1.5": (
            lambda: ce(x, target, label_smoothing=1.5)
        ),
        "label_smoothing must lie between 0 and 1, got nan": (
            lambda: ce(x, target, label_smoothing=float("nan"))
        ),
        "softcap must be 0 or a positive number that float32 holds, got -1": (
            lambda: ce(x, target, softcap=-1.0)
        ),
        "softcap must be 0 or a positive number that float32 holds, got 1e\\+300": (
            lambda: ce(x, target, softcap=1e300)
        ),
        "z_loss must be finite, got inf": lambda: ce(x, target, z_loss=float("inf")),
    }
    if devices:
        other = "meta" if device == "cpu" else "cpu"
        wrong["target must be on the device of input"] = lambda: ce(
            x, torch.zeros(4, dtype=torch.int64, device=other)
        )
        wrong["weight must be on the device of input"] = lambda: ce(
            x, target, torch.ones(6, device=other)
        )
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            call()


ce = functional.cross_entropy


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_messages(device):
    check_messages(device)


@pytest.mark.parametrize("wrong", [6, -1, -99, 2**40])
@pytest.mark.parametrize("row", [0, 3])
def test_targets_that_are_no_class(row, wrong):
    x, target = torch.randn(4, 6), torch.tensor([0, 5, -100, 2])
    target[row] = wrong
    message = f"target must lie between 0 and 5 or be ignore_index, -100, got {wrong}"
    with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
        ce(x, target)
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


def raw_arguments() -> tuple[dict, dict]:
    call = dict(
        input=torch.randn(3, 5), target=torch.tensor([0, 4, 1]), weight=None, ignore_index=-100,
        label_smoothing=0.0, softcap=0.0, reduction_kind=1,
    )  # fmt: skip
    _, statistics, total_weight = RAW.loss_forward(**call, z_loss=0.0, out_dtype=None)
    return call, dict(dloss=torch.ones(()), statistics=statistics, total_weight=total_weight)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reduction_kind": 3}, "reduction_kind must be one of 0 to 2, got 3"),
        ({"reduction_kind": -1}, "reduction_kind must be one of 0 to 2, got -1"),
        ({"weight": torch.ones(5).half()}, "weight must have dtype float32, got float16"),
        ({"input": None}, "input must be given, got none"),
        ({"target": None}, "target must be given, got none"),
        ({"out_dtype": torch.float64}, "out_dtype must have dtype float32, bfloat16 or float16"),
        ({"out_dtype": torch.int8}, "out_dtype must have dtype float32, bfloat16, float16 or"),
    ],
    ids=str,
)
def test_messages_of_raw_forwards(changes, message):
    call, _ = raw_arguments()
    call |= {"z_loss": 0.0, "out_dtype": None}
    for op in (RAW.loss_forward, RAW.loss_forward_check):
        op(**call)
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            op(**(call | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reduction_kind": 3}, "reduction_kind must be one of 0 to 2, got 3"),
        ({"dloss": torch.ones(3)}, r"dloss must have shape \(\), got \(3,\)"),
        ({"dloss": torch.ones(()).double()}, "dloss must have dtype float32, bfloat16 or"),
        ({"dloss": torch.ones((), device="meta")}, "dloss must be on the device of input"),
        ({"statistics": torch.ones(3, 4)}, r"statistics must have shape \(3, 3\), got \(3, 4\)"),
        ({"statistics": torch.ones(3, 3).half()}, "statistics must have dtype float32, got fl"),
        ({"total_weight": torch.ones(0)}, r"total_weight must have shape \(\), got \(0,\)"),
        ({"total_weight": torch.ones(()).half()}, "total_weight must have dtype float32, got"),
        ({"label_smoothing": -0.1}, "label_smoothing must lie between 0 and 1, got -0.1"),
    ],
    ids=str,
)
def test_messages_of_raw_backwards(changes, message):
    call, upstream = raw_arguments()
    given = call | upstream
    for name, op in {
        "backward": RAW.loss_backward,
        "backward ": RAW.loss_backward_check,
        "backward_inplace": RAW.loss_backward_inplace,
        "backward_inplace ": RAW.loss_backward_inplace_check,
    }.items():
        with pytest.raises(RuntimeError, match=f"^{OP}_{name.strip()}: {message}"):
            op(**(given | changes))


def result_of(x):
    """The same numbers as an operator's result, which may be written in place."""
    return x.requires_grad_() * 1.0


VIEWS_OF_A_LEAF = {
    "a leaf": lambda leaf: leaf,
    "a view of a leaf": lambda leaf: leaf.view(3, 5)[1:],
    "a view of a leaf, by unbind": lambda leaf: leaf.unsqueeze(0).unbind()[0],
}


@pytest.mark.parametrize("view", VIEWS_OF_A_LEAF)
def test_a_gradient_in_place_of_a_leaf_is_refused(view):
    """As torch refuses to write into one: its `.grad` would be its own memory."""
    leaf = torch.nn.Parameter(torch.randn(3, 5))
    before = leaf.detach().clone()
    x = VIEWS_OF_A_LEAF[view](leaf)
    target = torch.arange(len(x))
    message = "cross_entropy: input must be the result of an operator to be written in place where "
    message += f"a gradient is required, got {view.partition(',')[0]}$"
    for call in (ce, CrossEntropyLoss(inplace_backward=True)):
        more = {"inplace_backward": True} if call is ce else {}
        with pytest.raises(RuntimeError, match=message):
            call(x, target, **more)
        with torch.no_grad():  # without a backward nothing is written
            call(x, target, **more)
    ce(x.detach(), target, inplace_backward=True)
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


def test_python_arguments():
    x, target = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'mean', 'sum', got 'x'"):
        ce(x, target, reduction="x")
    with pytest.raises(TypeError, match="cross_entropy: inplace_backward must be True or False"):
        ce(x, target, inplace_backward=1)
    with pytest.raises(TypeError, match="cross_entropy: input must be a tensor, got list"):
        ce([1.0], target)
    with pytest.raises(TypeError, match="cross_entropy: target must be a tensor, got int"):
        ce(x, 2)
    weight = torch.ones(4, requires_grad=True)
    for logits in (x, x.clone().requires_grad_()):
        with pytest.raises(RuntimeError, match="weight must not require a gradient, got one that"):
            ce(logits, target, weight)
    with torch.no_grad():
        ce(x, target, weight)


def test_sizes_that_only_the_run_tells_are_left_to_it():
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.randn(4, 6)
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        loss = ce(x[rows], rows, reduction="none")
    assert loss.shape == rows.shape and loss.shape[0].node.hint is None


# ---- gradients in place --------------------------------------------------------------------------


def backwards(dtype=F32):
    """(a layer, its logits, targets), for gradients in place of the logits."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 40).to(dtype)
    logits = layer(torch.randn(6, 8, dtype=dtype))
    return layer, logits, torch.arange(6)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_gradients_of_the_layer_below(dtype):
    found = []
    for inplace in (True, False):
        layer, logits, target = backwards(dtype)
        ce(logits, target, inplace_backward=inplace).backward()
        found.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_second_backward_raises():
    _, logits, target = backwards()
    loss = ce(logits, target, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("other_inplace", [False, True])
def test_two_losses_of_the_same_logits(other_inplace):
    """The second gradient would be computed from overwritten logits, so it raises."""
    _, logits, target = backwards()
    second = ce(logits, target, inplace_backward=other_inplace)
    first = ce(logits, target, inplace_backward=True)  # autograd begins with the newest
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).backward()


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
            assert inplace and "modified by an inplace operation" in str(error)
            continue
        if expected is None:
            expected = layer.weight.grad
        assert torch.equal(layer.weight.grad, expected)


def test_logits_that_were_changed_meanwhile():
    layer, logits, target = backwards()
    loss = ce(logits, target, inplace_backward=True)
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
