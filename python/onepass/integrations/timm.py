"""onepass's optimizers in timm's registry, for `create_optimizer_v2` and `train.py --opt`.

    onepass.integrations.timm.register()
    optimizer = timm.optim.create_optimizer_v2(model, opt="onepassadamw", lr=1e-3)

The names have no underscore: timm takes what stands before one for a wrapper such as "lookahead",
and would make torch's AdamW of "onepass_adamw". timm is imported by `register`.
"""

from __future__ import annotations

from onepass import optim

# By class: what timm has to know of its arguments, and its own defaults for the like of it.
_FACTS = {
    optim.AdamW: dict(has_betas=True),
    optim.Adam: dict(has_betas=True),
    optim.SGD: dict(has_eps=False, has_momentum=True, defaults={"nesterov": True}),
    optim.Lion: dict(has_eps=False, has_betas=True),
}


def register() -> list[str]:
    """Enters `onepass.optim`'s optimizers into timm's registry; calling it again changes nothing.

    timm makes parameter groups as for its own: biases and norms without weight decay, layer decay.
    Options such as `master` are keywords of `create_optimizer_v2`, and `--opt-kwargs` of timm's
    scripts. As timm's "sgd", "onepasssgd" has Nesterov's momentum of 0.9 unless told otherwise.

    Returns:
        The names: "onepassadamw", "onepassadam", "onepasssgd", "onepasslion".

    Raises:
        ImportError: timm is not installed, has no such registry, or cannot be imported itself.
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
    names = []
    for cls, facts in _FACTS.items():
        name = f"onepass{cls.__name__.lower()}"
        names.append(name)
        if name not in known:
            description = f"onepass.optim.{cls.__name__}, in one pass over memory"
            default_registry.register(OptimInfo(name, cls, description, **facts))
    return names
