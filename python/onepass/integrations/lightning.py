"""`Swap`, a callback for Lightning's Trainer: `lightning.pytorch` or `pytorch_lightning`.

    trainer = Trainer(callbacks=[onepass.integrations.lightning.Swap()])

The optimizer is what `configure_optimizers` returns: one of `onepass.optim` needs nothing else.
Lightning is imported when `Swap` is imported.
"""

from __future__ import annotations

import functools
import importlib.util
import sys

from torch import nn

from onepass.integrations._session import Session, own_limit
from onepass.swapping import Report

__all__ = ["Swap"]  # noqa: F822 (made by __getattr__)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Strategies that shard the model before a run starts.
_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class SwapHooks:
    """The hooks of `Swap`: `onepass.swap` when a run of Lightning's Trainer starts, undone at its
    end.

    A run is a `fit`, `validate`, `test` or `predict`. The whole LightningModule is swapped, with
    what it made in `setup` and `configure_model`; a checkpoint is loaded by then, and weights are
    in the dtype of the precision. The logger "onepass.swap" gets a line with the swapped modules,
    the others and the reasons, and one for each note of the report. A run that raises restores the
    model too. Checkpoints are those of the stock model.

    Args:
        options: of `onepass.swap`.

    Raises:
        TypeError: an option that swap does not have.

    Examples:
        >>> from onepass.integrations.lightning import Swap
        >>> callback = Swap(exclude="head")  # for Trainer(callbacks=[callback])
        >>> callback.report is None  # until it has run
        True
    """

    def __init__(self, **options):
        super().__init__()
        self._session = Session(options)

    @property
    def report(self) -> Report | None:
        """The report of the last run; its `verify` needs a model that is still swapped."""
        return self._session.report

    def setup(self, trainer, pl_module: nn.Module, stage: str) -> None:
        """Refuses models for which the callback is too late.

        Raises:
            ValueError: the strategy shards the model.
        """
        name = type(trainer.strategy).__name__
        if any(cls.__name__ in _SHARDING for cls in type(trainer.strategy).__mro__):
            raise ValueError(
                "Swap: strategy must not shard the model, which it does before a run starts: call "
                f"onepass.swap(self.model) in configure_model, got {name}"
            )

    def on_fit_start(self, trainer, pl_module: nn.Module) -> None:
        """Swaps.

        Raises:
            ValueError: both the trainer and an optimizer would clip.
            RuntimeError: as `onepass.swap` under `strict`.
        """
        limits = [limit for limit in map(own_limit, trainer.optimizers) if limit is not None]
        by_value = trainer.gradient_clip_algorithm == "value"
        if limits and trainer.gradient_clip_val and not by_value:
            raise ValueError(
                "Swap: one of the two must clip, got gradient_clip_val="
                f"{trainer.gradient_clip_val} of the trainer and max_grad_norm={limits[0]} of the "
                "optimizer: leave one out"
            )
        self._begin(trainer, pl_module)

    def on_validation_start(self, trainer, pl_module: nn.Module) -> None:
        """Swaps, outside of `fit`."""
        if trainer.state.fn != "fit":
            self._begin(trainer, pl_module)

    def on_test_start(self, trainer, pl_module: nn.Module) -> None:
        """Swaps."""
        self._begin(trainer, pl_module)

    def on_predict_start(self, trainer, pl_module: nn.Module) -> None:
        """Swaps."""
        self._begin(trainer, pl_module)

    def teardown(self, trainer, pl_module: nn.Module, stage: str) -> None:
        """Restores."""
        self._session.end(tell=trainer.is_global_zero)

    def on_exception(self, trainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Restores."""
        self._session.end(tell=trainer.is_global_zero)

    def _begin(self, trainer, pl_module: nn.Module) -> None:
        self._session.begin(pl_module, tell=trainer.is_global_zero)


def __getattr__(name: str):
    if name == "Swap":
        return _callback(tuple(package.Callback for package in _imported()))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported() -> list:
    """The packages that are imported; if none is, the first that is installed."""
    found = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    for name in _PACKAGES:
        if not found and importlib.util.find_spec(name.partition(".")[0]):
            found.append(importlib.import_module(name))
    if not found:
        raise ImportError(
            "onepass.integrations.lightning: neither lightning nor pytorch-lightning is installed: "
            "pip install lightning"
        )
    return found


@functools.cache
def _callback(bases: tuple[type, ...]) -> type:
    made = type("Swap", (SwapHooks, *bases), {"__doc__": SwapHooks.__doc__})
    made.__module__ = __name__
    return made
