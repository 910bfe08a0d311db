"""The rule that gives parameters of a model to Muon or AdamW."""

from __future__ import annotations

import collections
import fnmatch
from collections.abc import Iterable, Mapping

from torch import nn

from onepass.optim.matrices import Matrices

# Of the layer that makes a model's outputs: anywhere, and at the top of a model.
_HEADS = ("head", "lm_head", "classifier", "score", "embed_out", "unembed", "output_projection")
_HEADS_ON_TOP = ("fc", "output")


def muon_groups(
    model: nn.Module,
    *,
    others: Iterable[str] = (),
    matrices: Mapping[str, Matrices] | None = None,
) -> list[dict]:
    """The parameter groups of a model for `onepass.optim.MuonWithAdamW`.

    Muon gets the parameters of two dimensions, AdamW all others. AdamW also gets embeddings and
    parameters tied to them (`torch.nn.Embedding`, names with "embed"), and heads: layers named
    head, lm_head, classifier, score, embed_out, unembed or output_projection, at the top of the
    model fc or output, the result of `get_output_embeddings` of a model of transformers, and a
    linear layer whose weight is the only one with an embedding's shape. Frozen parameters are left
    out. Name patterns override the rule.

    Args:
        model: its parameters are named in the groups.
        others: patterns of parameter names, as in `fnmatch`, for AdamW.
        matrices: {pattern: setting} for parameters of Muon that consist of several matrices,
            such as {"*.qkv.weight": 3} or {"*.experts.*": "stacked"}; see
            `onepass.optim.Muon`. The first pattern that fits holds.

    Returns:
        Groups: Muon's, one more of Muon's for each pattern in `matrices`, AdamW's. None is empty.

    Raises:
        ValueError: a pattern that no parameter has.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(99, 64), torch.nn.Linear(64, 192))
        >>> groups = onepass.optim.muon_groups(model, matrices={"1.weight": 3})
        >>> [(group["use_muon"], [name for name, _ in group["params"]]) for group in groups]
        [(True, ['1.weight']), (False, ['0.weight', '1.bias'])]
    """
    patterns, others = dict(matrices or {}), list(others)
    kept = _apart(model)
    groups: dict[str | None, dict] = {None: {"params": [], "use_muon": True}}
    for pattern, setting in patterns.items():
        groups[pattern] = {"params": [], "use_muon": True, "matrices": setting}
    rest: dict = {"params": [], "use_muon": False}
    unused = {*others, *patterns}
    for name, param in model.named_parameters():
        fitting = [p for p in (*others, *patterns) if fnmatch.fnmatchcase(name, p)]
        unused.difference_update(fitting)
        if not param.requires_grad:
            continue
        if fitting:
            group = rest if fitting[0] in others else groups[fitting[0]]
        else:
            group = (
                rest if param.ndim != 2 or id(param) in kept or _is_named(name) else groups[None]
            )
        group["params"].append((name, param))
    if unused:
        raise ValueError(
            "muon_groups: others and matrices must name parameters of the model, got "
            f"{sorted(unused)}, which none has"
        )
    return [group for group in (*groups.values(), rest) if group["params"]]


def _is_named(name: str) -> bool:
    """Whether a parameter's name says that it is an embedding's or a head's."""
    path = name.split(".")
    if "embed" in name.lower():
        return True
    owner = path[-2:-1]
    return bool(owner) and (owner[0] in _HEADS or (len(path) == 2 and owner[0] in _HEADS_ON_TOP))


def _apart(model: nn.Module) -> set[int]:
    """The ids of embeddings' weights and heads' weights, by their modules."""
    modules = list(model.modules())
    embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    found = {id(m.weight) for m in embeddings}
    sizes = {m.weight.shape for m in embeddings}
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    shapes = collections.Counter(m.weight.shape for m in linears)
    for module in linears:
        if module.weight.shape in sizes and shapes[module.weight.shape] == 1:
            found.add(id(module.weight))
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        found.update(map(id, head.parameters()))
    return found
