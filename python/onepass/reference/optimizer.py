"""The optimizers' formulas in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_grad_norm(
    gradients: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
) -> tuple[Tensor, list[Tensor]]:
    """(norm of all gradients as one vector, the gradients scaled to max_norm if it is above that).

    Pascanu, Mikolov, Bengio: On the difficulty of training recurrent neural networks, ICML 2013.
    """
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    norm = torch.linalg.vector_norm(flat, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return norm, [gradient * factor for gradient in gradients]


def adamw(
    param: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> tuple[Tensor, Tensor, Tensor]:
    """(param, exp_avg, exp_avg_sq) after step number `step`, counted from 1.

    Loshchilov, Hutter: Decoupled weight decay regularization, ICLR 2019.
    """
    exp_avg, exp_avg_sq, mean, root = _moments(gradient, exp_avg, exp_avg_sq, step, betas)
    param = param * (1 - lr * weight_decay) - lr * mean / (root + eps)
    return param, exp_avg, exp_avg_sq


def sgd(
    param: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor]:
    """(param, momentum_buffer); the buffer is None before the first step, as in torch."""
    gradient = gradient + weight_decay * param
    if momentum_buffer is None:
        momentum_buffer = gradient
    else:
        momentum_buffer = momentum * momentum_buffer + (1 - dampening) * gradient
    if momentum:
        gradient = gradient + momentum * momentum_buffer if nesterov else momentum_buffer
    return param - lr * gradient, momentum_buffer


def lion(
    param: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(param, exp_avg).

    Chen et al.: Symbolic discovery of optimization algorithms, NeurIPS 2023.
    """
    update = torch.sign(betas[0] * exp_avg + (1 - betas[0]) * gradient)
    param = param * (1 - lr * weight_decay) - lr * update
    return param, betas[1] * exp_avg + (1 - betas[1]) * gradient


def newton_schulz(
    matrix: Tensor,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """About U V^T of a matrix U S V^T: its singular values come near one.

    Jordan et al.: Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / torch.linalg.matrix_norm(x).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def muon(
    param: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(param, momentum_buffer) of a matrix, in torch's form.

    Jordan et al.: Muon: an optimizer for hidden layers in neural networks, 2024; Liu et al.: Muon
    is scalable for LLM training, 2025 ("match_rms_adamw").
    """
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient
    update = momentum * momentum_buffer + (1 - momentum) * gradient
    update = newton_schulz(update if nesterov else momentum_buffer, ns_coefficients, ns_steps, eps)
    rows, columns = param.shape
    scale = max(1.0, rows / columns) ** 0.5
    if adjust_lr_fn == "match_rms_adamw":
        scale = 0.2 * max(rows, columns) ** 0.5
    return param * (1 - lr * weight_decay) - lr * scale * update, momentum_buffer


def adafactor(
    param: Tensor,
    gradient: Tensor,
    states: dict[str, Tensor],
    step: int,
    *,
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float, float] = (2**-23, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(param, states) after step number `step`, counted from 1, in torch's form.

    states: "row_var" (..., rows, 1) and "col_var" (..., 1, columns), or "variance" of a vector.

    Shazeer, Stern: Adafactor: adaptive learning rates with sublinear memory cost, ICML 2018.
    """
    beta2 = 1 - step**beta2_decay
    size = max(eps[1], _root_mean_square(param)) * min(lr, step**-0.5)

    def averaged(key: str, square: Tensor) -> Tensor:
        return beta2 * states[key] + (1 - beta2) * square

    if gradient.dim() > 1:
        row = averaged("row_var", gradient.square().mean(-1, keepdim=True))
        column = averaged("col_var", gradient.square().mean(-2, keepdim=True))
        square = row @ column / row.mean(-2, keepdim=True).clamp(min=eps[0])
        states = {"row_var": row, "col_var": column}
    else:
        square = averaged("variance", gradient.square())
        states = {"variance": square}
    update = gradient / square.clamp(min=eps[0] ** 2).sqrt()
    update = update / max(1.0, _root_mean_square(update) / d)
    return param * (1 - lr * weight_decay) - size * update, states


def lamb(
    param: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
) -> tuple[Tensor, Tensor, Tensor]:
    """(param, exp_avg, exp_avg_sq) after step number `step`, counted from 1.

    You et al.: Large batch optimization for deep learning: training BERT in 76 minutes, ICLR 2020,
    with the identity for phi; the ratio is one where a norm is zero.
    """
    exp_avg, exp_avg_sq, mean, root = _moments(gradient, exp_avg, exp_avg_sq, step, betas)
    update = mean / (root + eps) + weight_decay * param
    norm, length = param.norm(), update.norm()
    ratio = norm / length if norm > 0 and length > 0 else 1.0
    return param - lr * ratio * update, exp_avg, exp_avg_sq


def _moments(
    gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, betas: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(exp_avg, exp_avg_sq) after the step, and Adam's mean and root of them, bias corrected."""
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * gradient
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * gradient**2
    mean = exp_avg / (1 - betas[0] ** step)
    return exp_avg, exp_avg_sq, mean, (exp_avg_sq / (1 - betas[1] ** step)).sqrt()


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.norm()) / tensor.numel() ** 0.5
