"""Integrations that serve `swap` and `quantize`, each found by the package whose models it knows.

`swap` names no class of another package, and imports none. What it must know of one stands in
`onepass.integrations`: the names below are modules there, imported when a model of that package is
met. Each line says what its module provides.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# NOTE, refusal(module): attention that diffusers dispatches to a back end.
DIFFUSERS = "diffusers"
# forward_of(forward), head_of(name), head_name(model), obstacle(head): losses without logits.
LAZY_LOGITS = "transformers.lazy_logits"
# redirected(loss_function): the loss that a model of transformers looks up.
LOSSES = "transformers.losses"
# edits, names and notes of attention that modules take by a name in their config; stock(model) and
# implementations(model): what `attach` has done.
MODELS = "transformers.models"
# prepared(model): what `quantize` does for peft's layers.
PEFT = "peft"
# words(module), refusal(module), layer_of(module): linear layers that another library quantised.
QUANTIZED = "quantized_layers"
# computing(function, spec), forward_of(forward): functions of state-space layers that stand in for
# those of a package; prove(called, beside), whether one is computed.
SCANS = "transformers.scans"
SCANS_PROOF = "transformers.scans_proof"


def provider(name: str) -> ModuleType:
    """The module of this name in `onepass.integrations`.

    Raises:
        ImportError: the package has a version that the integration does not know.
    """
    return importlib.import_module(f"onepass.integrations.{name}")


def imported(name: str) -> ModuleType | None:
    """The same, if it is imported already: otherwise it has done nothing."""
    return sys.modules.get(f"onepass.integrations.{name}")
