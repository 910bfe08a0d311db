"""linear_cross_entropy: every message, with data and without."""

from __future__ import annotations

import pytest
import torch

from onepass import functional
from tests.loss.cases import RAW

OP = "linear_cross_entropy"
lce = functional.linear_cross_entropy


def check_messages(device: str, devices: bool = True):
    x, w = torch.randn(4, 6, device=device), torch.randn(9, 6, device=device)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    weight = torch.ones(9, device=device)
    shape = (
        r"input must have shape \(in_features,\) or \(rows, in_features\), other dimensions being "
        r"flattened"
    )
    wrong = {
        rf"{shape}, got \(2, 2, 6\)": (lambda: lce(x.view(2, 2, 6), w, target.view(2, 2))),
        rf"{shape}, got \(\)": lambda: lce(x[0, 0], w, target[0]),
        r"linear_weight must have shape \(classes, 6\), got \(9, 5\)": (
            lambda: lce(x, w[:, :5], target)
        ),
        r"linear_weight must have shape \(classes, 6\), got \(6,\)": lambda: lce(x, w[0], target),
        "linear_weight must have dtype float32, bfloat16 or float16 beside input, got float64": (
            lambda: lce(x, w.double(), target)
        ),
        r"linear_bias must have shape \(9,\), got \(8,\)": (
            lambda: lce(x, w, target, linear_bias=weight[:8])
        ),
        "linear_bias must have dtype float32, bfloat16 or float16 beside input, got float64": (
            lambda: lce(x, w, target, linear_bias=weight.double())
        ),
        r"target must have shape \(4,\), got \(3,\)": lambda: lce(x, w, target[:3]),
        r"target must have shape \(\), got \(1,\)": lambda: lce(x[0], w, target[:1]),
        r"target must have dtype int64, indices of classes \(.*\), got float32": (
            lambda: lce(x, w, x)
        ),
        "input must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: lce(x.long(), w, target)
        ),
        r"weight must have shape \(9,\), got \(5,\)": lambda: lce(x, w, target, weight=weight[:5]),
        # Before its numbers are looked up.
        r"weight must have shape \(9,\), got \(4,\)": (
            lambda: lce(x, w, target + 8, weight=weight[:4])
        ),
        r"weight must have shape \(9,\), got \(\)": lambda: lce(x, w, target, weight=weight[0]),
        r"target must have dtype int64, indices of classes \(.*\), got float64": (
            lambda: lce(x, w, target.double(), weight=weight)
        ),
        r"linear_weight must have shape \(classes, 6\), got \(\)": (
            lambda: lce(x, w[0, 0], target, weight=weight)
        ),
        "weight must have dtype float64 like input, got float32": (
            lambda: lce(x.double(), w.double(), target, weight=weight)
        ),
        "label_smoothing must lie between 0 and 1, got 1.5": (
            lambda: lce(x, w, target, label_smoothing=1.5)
        ),
        "softcap must be 0 or a positive number that float32 holds, got -1": (
            lambda: lce(x, w, target, softcap=-1.0)
        ),
        "z_loss must be finite, got inf": lambda: lce(x, w, target, z_loss=float("inf")),
    }
    if devices:
        other = "meta" if device == "cpu" else "cpu"
        wrong |= {
            "linear_weight must be on the device of input": (
                lambda: lce(x, torch.empty_like(w, device=other), target)
            ),
            "linear_bias must be on the device of input": (
                lambda: lce(x, w, target, linear_bias=torch.ones(9, device=other))
            ),
            "target must be on the device of input": (
                lambda: lce(x, w, torch.empty_like(target, device=other), weight=weight)
            ),
            "weight must be on the device of input": (
                lambda: lce(x, w, target, weight=torch.ones(9, device=other))
            ),
        }
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            call()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_messages(device):
    check_messages(device)


@pytest.mark.parametrize("wrong", [9, -1, 2**40])
@pytest.mark.parametrize("options", [{}, {"weight": torch.ones(9)}], ids=["plain", "weighted"])
def test_targets_that_are_no_class(wrong, options):
    target = torch.tensor([0, -100, wrong, 2])
    message = f"target must lie between 0 and 8 or be ignore_index, -100, got {wrong}"
    with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
        lce(torch.randn(4, 6), torch.randn(9, 6), target, **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gradient_mask": 8}, "gradient_mask must be one of 0 to 7, got 8"),
        ({"gradient_mask": -1}, "gradient_mask must be one of 0 to 7, got -1"),
        ({"gradient_mask": 0}, "dloss must be given for gradients and only then, got one"),
        ({"dloss": None}, "dloss must be given for gradients and only then, got none"),
        ({"dloss": torch.ones(())}, r"dloss must have shape \(3,\), got \(\)"),
        ({"weight": torch.ones(5).half()}, "weight must have dtype float32, got float16"),
        ({"input": None}, "input must be given, got none"),
        ({"linear_weight": None}, "linear_weight must be given, got none"),
        ({"target": None}, "target must be given, got none"),
    ],
    ids=str,
)
def test_messages_of_the_raw_operator(changes, message):
    call = dict(
        input=torch.randn(3, 4), linear_weight=torch.randn(5, 4), target=torch.tensor([0, 4, 1]),
        linear_bias=None, weight=None, ignore_index=-100, label_smoothing=0.0, softcap=0.0,
        z_loss=0.0, dloss=torch.ones(3), gradient_mask=7,
    )  # fmt: skip
    for op in (RAW.linear_loss, RAW.linear_loss_check):
        op(**call)
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            op(**(call | changes))


def test_reductions_are_torchs():
    x, w, target = torch.randn(4, 6), torch.randn(9, 6), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=rf"^{OP}: reduction must be one of 'none', 'mean', 'sum', got 'batchmean'"
    ):
        lce(x, w, target, reduction="batchmean")


def test_weights_of_classes_get_no_gradient():
    x, w = torch.randn(4, 6), torch.randn(9, 6)
    weight = torch.ones(9, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"^{OP}: weight must not require a gradient"):
        lce(x, w, torch.zeros(4, dtype=torch.int64), weight=weight)
