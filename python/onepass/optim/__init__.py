"""torch.optim's optimizers in one pass over memory, and clipping."""

import onepass._ops  # noqa: F401, first: it reports a broken installation
from onepass.optim.accumulate import fused_accumulate
from onepass.optim.adafactor import Adafactor
from onepass.optim.adam import Adam, AdamW
from onepass.optim.clip import clip_grad_norm_
from onepass.optim.fuse import fuse
from onepass.optim.lamb import LAMB
from onepass.optim.lion import Lion
from onepass.optim.muon import Muon
from onepass.optim.muon_adamw import MuonWithAdamW
from onepass.optim.muon_groups import muon_groups
from onepass.optim.sgd import SGD

__all__ = [
    "Adafactor",
    "Adam",
    "AdamW",
    "LAMB",
    "Lion",
    "Muon",
    "MuonWithAdamW",
    "SGD",
    "clip_grad_norm_",
    "fuse",
    "fused_accumulate",
    "muon_groups",
]
