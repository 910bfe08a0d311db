"""What a training step does with gradients, in one pass over memory. No optimizers yet."""

from onepass.optim.clip import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
