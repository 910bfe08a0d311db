"""onepass under transformers' Trainer: an optimizer for it, and a callback that swaps the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from onepass import optim
from onepass.integrations._session import Session, own_limit
from onepass.optim.optimizer import FlatOptimizer
from onepass.swapping import Report

# Settings that belong to the Trainer, and their names there.
_TRAINERS = {
    "params": "is what the Trainer passes: the model's, in groups with and without weight decay",
    "weight_decay": "must be set as TrainingArguments.weight_decay, which the Trainer writes into "
    "its parameter groups",
    "max_grad_norm": "must be set as TrainingArguments.max_grad_norm: the Trainer measures the "
    "norm for its log in any case, and clips as it does",
    "zero_grads": "must be left out: the Trainer frees gradients after each step",
}


class _Settings(Mapping):
    """Arguments of an optimizer; the Trainer's own are read when they are used, since a search over
    hyperparameters changes them."""

    def __init__(self, args: TrainingArguments, cls: type[FlatOptimizer], settings: dict):
        self._args, self._cls, self._settings = args, cls, settings

    def _now(self) -> dict:
        args = self._args
        taken = {"lr": args.learning_rate}
        if issubclass(self._cls, (optim.Adam, optim.AdamW)):
            taken["betas"] = (args.adam_beta1, args.adam_beta2)
            taken["eps"] = args.adam_epsilon
        return {**taken, **self._settings}

    def __getitem__(self, name: str) -> object:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(self._now())


def trainer_optimizer(
    args: TrainingArguments | None = None,
    cls: type[FlatOptimizer] = optim.AdamW,
    **settings,
) -> tuple[type[FlatOptimizer], Mapping]:
    """An optimizer of onepass for `Trainer(optimizer_cls_and_kwargs=...)`.

    The Trainer makes it with its own parameter groups, so biases and norms have no weight decay. It
    passes none of its arguments to such an optimizer, so the learning rate is taken here.

    Args:
        args: the Trainer's. Learning rate, and for Adam and AdamW `adam_beta1`, `adam_beta2` and
            `adam_epsilon`, are taken from it when the Trainer makes the optimizer, unless
            `settings` have them.
        cls: `onepass.optim.AdamW`, `Adam`, `SGD` or `Lion`.
        settings: further arguments of `cls`, such as `master` and `state_dtype`.

    Returns:
        (cls, its arguments).

    Raises:
        TypeError: cls is no optimizer of onepass; it has no such argument; no learning rate.
        ValueError: a setting that is the Trainer's, or that `cls` refuses.

    Examples:
        >>> from onepass.integrations.transformers import trainer_optimizer
        >>> cls, settings = trainer_optimizer(lr=1e-4, master="fp32")
        >>> cls.__name__, settings
        ('AdamW', {'lr': 0.0001, 'master': 'fp32'})
    """
    if not (isinstance(cls, type) and issubclass(cls, FlatOptimizer)):
        raise TypeError(f"trainer_optimizer: cls must be a class of onepass.optim, got {cls!r}")
    for name, rule in _TRAINERS.items():
        if name in settings:
            raise ValueError(f"trainer_optimizer: {name} {rule}, got {settings[name]!r}")
    if args is not None:
        if not isinstance(args, TrainingArguments):
            raise TypeError(
                "trainer_optimizer: args must be transformers.TrainingArguments, got "
                f"{type(args).__name__}"
            )
    elif "lr" not in settings:
        raise TypeError(
            "trainer_optimizer: lr must be given, or the TrainingArguments that have it: the "
            "Trainer does not hand its learning_rate on"
        )
    try:
        inspect.signature(cls).bind([], **settings)
    except TypeError as error:
        raise TypeError(
            f"trainer_optimizer: settings must be {cls.__name__}'s, got {error}"
        ) from None
    return cls, settings if args is None else _Settings(args, cls, settings)


class SwapCallback(TrainerCallback):
    """Runs a Trainer's training on onepass's operators, attention included.

    `onepass.swap` at the beginning of `train()`, undone at its end. The logger "onepass.swap" gets
    a line with the swapped modules, the others and the reasons, and one for each note of the
    report. If `train()` raises, the model stays swapped until the next `train()`, or `restore()`.
    Checkpoints are those of the stock model.

    Args:
        options: of `onepass.swap`.

    Raises:
        TypeError: an option that swap does not have.

    Examples:
        >>> from onepass.integrations.transformers import SwapCallback
        >>> callback = SwapCallback(exclude="lm_head")  # for Trainer(callbacks=[callback])
        >>> callback.report is None  # until it has trained
        True
    """

    def __init__(self, **options):
        self._session = Session(options)

    @property
    def report(self) -> Report | None:
        """The report of the last training; its `verify` needs a model that is still swapped."""
        return self._session.report

    def restore(self) -> None:
        """Restores modules that a failed training left swapped."""
        self._session.end(tell=True)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> None:
        """Refuses models for which the callback is too late.

        Raises:
            ValueError: the Trainer would shard the model.
        """
        if args.fsdp:
            raise ValueError(
                "SwapCallback: args must not ask for FSDP, which shards the model before training "
                f"begins: call onepass.swap(model) before Trainer(model), got fsdp={args.fsdp!r}"
            )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model=None,
        optimizer=None,
        **kwargs,
    ) -> None:
        """Swaps.

        Raises:
            ValueError: both the Trainer and the optimizer would clip.
            RuntimeError: as `onepass.swap` under `strict`.
        """
        limit = own_limit(optimizer)
        if limit is not None and args.max_grad_norm > 0:
            raise ValueError(
                "SwapCallback: one of the two must clip, got max_grad_norm="
                f"{args.max_grad_norm} of TrainingArguments and {limit} of the optimizer: set that "
                "of TrainingArguments to 0, or leave the optimizer's out"
            )
        self._session.begin(model, tell=state.is_world_process_zero)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> None:
        """Restores."""
        self._session.end(tell=state.is_world_process_zero)
