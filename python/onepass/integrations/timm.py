"""onepass's optimizers in timm's registry, for `create_optimizer_v2` and `train.py --opt`.

    onepass.integrations.timm.register()
    optimizer = timm.optim.create_optimizer_v2(model, opt="onepassadamw", lr=1e-3)

The names have no underscore: timm takes the part before one for a wrapper such as "lookahead", and
would make torch's AdamW from "onepass_adamw". timm is imported by `register`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from torch import Tensor

from onepass import optim
from onepass.optim.optimizer import FlatOptimizer

__all__ = ["register"]

PREFIX = "onepass"
# timm's defaults for the corresponding optimizers.
_DEFAULTS = {"onepasssgd": {"nesterov": True}}
_ADAMW_EPS = 1e-8


def register() -> list[str]:
    """Adds `onepass.optim`'s optimizers to timm's registry; calling it again changes nothing.

    timm makes parameter groups as for its own: biases and norms without weight decay, layer decay.
    Options such as `master` are keywords of `create_optimizer_v2`, and `--opt-kwargs` of timm's
    scripts. As timm's "sgd", "onepasssgd" has Nesterov's momentum of 0.9 unless told otherwise.

    "onepassmuon" is `onepass.optim.MuonWithAdamW` with timm's rule for its own "muon": Muon has the
    matrices and the filters of convolutions, "flattened", but for those with a size of one in one
    of the first two dimensions, fewer than 4 rows or columns, or 128 times as many of one as of the
    other; AdamW has all others, and the parameters of timm's `fallback_list`. timm passes
    a momentum of 0.9 unless told otherwise, and `eps` is AdamW's.

    Returns:
        The names: "onepassadafactor", "onepassadam", "onepassadamw", "onepasslamb", "onepasslion",
        "onepasssgd", "onepassmuon".

    Raises:
        ImportError: timm is not installed, has no such registry, or cannot be imported itself.

    Examples:
        >>> import timm
        >>> from onepass.integrations.timm import register
        >>> "onepassadamw" in register()
        True
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = timm.optim.create_optimizer_v2(model, opt="onepassadamw", lr=1e-3)
        >>> isinstance(optimizer, onepass.optim.AdamW)
        True
    """
    try:
        from timm.optim import OptimInfo, list_optimizers
        from timm.optim._optim_factory import default_registry
    except ImportError as error:
        raise ImportError(
            "onepass.integrations.timm: timm must have a registry of optimizers, and what timm "
            f"itself imports must be installed: pip install --upgrade timm (got {error})"
        ) from error
    known = set(list_optimizers())
    found = _optimizers()
    for name, make in found.items():
        if name in known:
            continue
        description = f"onepass.optim.{make.__name__}, one update for all parameters"
        facts = _facts(optim.MuonWithAdamW if make is _muon else make)
        defaults = _DEFAULTS.get(name)
        default_registry.register(OptimInfo(name, make, description, defaults=defaults, **facts))
    return list(found)


def _optimizers() -> dict[str, Callable]:
    """The optimizers by name; Muon without AdamW would take no biases."""
    classes = [getattr(optim, name) for name in optim.__all__]
    kinds = [c for c in classes if isinstance(c, type) and issubclass(c, FlatOptimizer)]
    plain = [c for c in kinds if not issubclass(c, optim.Muon)]
    return {PREFIX + c.__name__.lower(): c for c in plain} | {f"{PREFIX}muon": _muon}


def _facts(cls: type) -> dict[str, bool]:
    """timm's facts on the arguments of a class."""
    arguments = inspect.signature(cls).parameters
    return {
        # A number: Adafactor has two.
        "has_eps": "eps" in arguments and isinstance(arguments["eps"].default, float),
        "has_betas": "betas" in arguments,
        "has_momentum": "momentum" in arguments,
    }


def _muon(params: Iterable, **settings) -> optim.MuonWithAdamW:
    """`onepass.optim.MuonWithAdamW` of timm's groups."""
    eps = settings.pop("eps", _ADAMW_EPS)
    settings.pop("foreach", None)  # which chooses between torch's implementations
    items = list(params)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    split: list[dict] = []
    for group in groups:
        others = {
            key: value for key, value in group.items() if key not in ("params", "use_fallback")
        }
        held = group["params"]
        held = [held] if isinstance(held, Tensor) else list(held)
        kinds: dict[str | None, list[Tensor]] = {"matrix": [], "flattened": [], None: []}
        for param in held:
            kinds[None if group.get("use_fallback") else _kind(param)].append(param)
        split += [
            {**others, "params": kinds["matrix"], "use_muon": True},
            {**others, "params": kinds["flattened"], "use_muon": True, "matrices": "flattened"},
            {"eps": eps, **others, "params": kinds[None], "use_muon": False},
        ]
    return optim.MuonWithAdamW([group for group in split if group["params"]], **settings)


_muon.__name__ = "MuonWithAdamW"


def _kind(param: Tensor) -> str | None:
    """The setting of a parameter in Muon, by timm's rule; None: it belongs to AdamW."""
    shape = param.shape
    if len(shape) < 2 or 1 in shape[:2]:
        return None
    rows, columns = shape[0], shape[1:].numel()
    least, most = sorted((rows, columns))
    if least < 4 or most > 128 * least:
        return None
    return "matrix" if len(shape) == 2 else "flattened"
