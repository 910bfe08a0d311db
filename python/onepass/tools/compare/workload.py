"""The workload: the GPT on text, or the user's model, with one interface.

A workload builds the stock model (the same weights each time), gives the batch of a step (the same
each time), measures the loss that the sameness phase plots, and makes a stock model whose numbers
differ by rounding alone.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from onepass.tools.compare.settings import Settings
from onepass.tools.data import Batches, Text, held_out_batch
from onepass.tools.model import GPT, Sizes, move
from onepass.tools.user_model import batch_of, check_trainable, load_user_model, tokens_in

HELD_OUT_TOKENS = 4096  # per point of a loss curve
HELD_OUT_ROWS = 4  # of one forward while measuring it: keeps the memory small


def workload_of(settings: Settings, text: Text | None, dropout: float | None):
    """The workload of the speed phase; --model has no text of ours."""
    if text is None:
        return UserWorkload(settings)
    return GptWorkload(settings, text, settings.speed, dropout)


class GptWorkload:
    """The GPT at given sizes and dropout on a text."""

    def __init__(self, settings: Settings, text: Text, sizes: Sizes, dropout: float):
        self.settings, self.sizes, self.dropout = settings, sizes, dropout
        self.device = settings.device
        self.items_per_batch = sizes.batch * sizes.block
        self.curve_name = "held-out loss, nats per byte"
        self._batches = Batches(text, sizes.block, sizes.batch, settings.seed)
        rows = max(HELD_OUT_ROWS, HELD_OUT_TOKENS // sizes.block)
        self._held_out = move(held_out_batch(text, sizes.block, rows), self.device)

    def build(self) -> nn.Module:
        torch.manual_seed(self.settings.seed)
        return GPT(self.sizes, self.dropout, self.settings.rmsnorm).to(self.device)

    def batch(self, step: int):
        return move(self._batches(step), self.device)

    def small_batch(self):
        """A batch that fills caches and optimizer state without touching much memory."""
        tokens, targets = self._batches(0)
        return move((tokens[:1, :8], targets[:1, :8]), self.device)

    def reorder(self, model: GPT, seed: int) -> None:
        model.reorder_features(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def curve_point(self, trainer, training_loss: Tensor | None) -> float:
        """Loss on the held-out windows, averaged in float64 so that small gaps are resolved."""
        trainer.model.eval()
        chunks = zip(*(part.split(HELD_OUT_ROWS) for part in self._held_out), strict=True)
        losses = [trainer.loss(chunk).double() for chunk in chunks]
        trainer.model.train()
        return torch.stack(losses).mean().item()


class UserWorkload:
    """The model that --model names, on the batches that come with it."""

    dropout = None  # the model's own

    def __init__(self, settings: Settings):
        self.settings, self.device = settings, settings.device
        self._model, self._batch = load_user_model(settings.model, settings.seed)
        check_trainable(self._model)
        self._model.to(self.device).train()
        self.items_per_batch = tokens_in(batch_of(self._batch, 0))
        self.curve_name = "training loss"

    def build(self) -> nn.Module:
        return copy.deepcopy(self._model)

    def batch(self, step: int):
        return move(batch_of(self._batch, step), self.device)

    def small_batch(self):
        return self.batch(0)

    @torch.no_grad()
    def reorder(self, model: nn.Module, seed: int) -> None:
        """Moves each weight by one rounding up, down or not, as another order of sums may do."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                sign = torch.randint(-1, 2, parameter.shape, generator=generator, device="cpu")
                eps = torch.finfo(parameter.dtype).eps
                parameter.mul_(1 + eps * sign.to(parameter.device, parameter.dtype))

    def curve_point(self, trainer, training_loss: Tensor | None) -> float:
        return float("nan") if training_loss is None else training_loss.item()
