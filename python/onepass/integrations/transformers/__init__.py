"""onepass's attention in models of transformers, by transformers' own switch; and their loss.

    model = AutoModelForCausalLM.from_pretrained(...)
    print(onepass.swap(model))                 # norms, dropouts and attention; unswap undoes it

    import onepass.integrations.transformers as onepass_transformers

    print(onepass_transformers.attach(model))  # attention and loss; lazy_logits=True: no logits
    onepass_transformers.detach(model)         # back to "sdpa", "eager", ...

    Trainer(..., optimizer_cls_and_kwargs=onepass_transformers.trainer_optimizer(args),
            callbacks=[onepass_transformers.SwapCallback()])

transformers' models take attention from a registry, by the name in their config. `register` adds
`"onepass"` to it, for `from_pretrained(..., attn_implementation="onepass")` too; `attach` does that
and sets the name in an existing model. For modules with their own attention code (Falcon, GPT-J)
use `onepass.swap`.

It computes the same as transformers' own "sdpa", and calls that "sdpa" refuses: capped scores
(Gemma 2), attention sinks (gpt-oss), keys that an indexer selects (DeepSeek 3.2), packed sequences
by `cu_seq_lens_q` and `cu_seq_lens_k` without a mask. Heads that share keys and values are never
expanded, a position bias (T5) is not merged with a mask, and a step of decoding reads the cache
once, without its padding. Dropout uses onepass's random stream, which follows `manual_seed` and
differs from torch's; a query whose keys are all masked has output 0. As with "sdpa",
`output_attentions=True` gives None and a warning: there is no matrix of weights.

`save_pretrained` does not write the name, so that a checkpoint loads where onepass is not
installed. A model that is pickled whole needs onepass, and registers it as it is loaded.
transformers allows continuous batching, and the Trainer context parallelism, only for its own
names, and its errors say so.

    attention.py  the registered functions: the masks and the attention
    cache.py      a KV cache of 8 bits: Int8Cache
    models.py     attach, detach, and the parts of swap and unswap for these models
    ring.py       ring attention: register_ring
    losses.py     losses on onepass's cross entropy; lazy_logits.py those without their logits
    quantization.py  QuantizationConfig: `from_pretrained` of quantised models;
                  quantized_experts.py gpt-oss's experts
    kernels.py    layers for transformers' `set_use_kernels`
    scans.py      functions of scans and linear attention for `onepass.swap`; scans_proof.py tests
                  them
    trainer.py    the optimizer and the callback for transformers' Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import transformers as _transformers
except ModuleNotFoundError as _error:
    if _error.name != "transformers":
        raise
    raise ImportError(
        "onepass.integrations.transformers: the package transformers is not installed: "
        "pip install transformers"
    ) from None
if not hasattr(_transformers, "AttentionMaskInterface"):
    raise ImportError(
        "onepass.integrations.transformers: transformers must have AttentionMaskInterface, got "
        f"version {_transformers.__version__}: pip install --upgrade transformers"
    )

from onepass.integrations.transformers.attention import NAME, register
from onepass.integrations.transformers.cache import Int8Cache
from onepass.integrations.transformers.kernels import register_kernels
from onepass.integrations.transformers.models import Attachment, attach, detach
from onepass.integrations.transformers.ring import register_ring

if TYPE_CHECKING:
    from onepass.integrations.transformers.quantization import QuantizationConfig
    from onepass.integrations.transformers.trainer import SwapCallback, trainer_optimizer

__all__ = [
    "Attachment",
    "Int8Cache",
    "NAME",
    "QuantizationConfig",
    "SwapCallback",
    "attach",
    "detach",
    "register",
    "register_kernels",
    "register_ring",
    "trainer_optimizer",
]


def __getattr__(name: str):
    """Imports parts when they are used: transformers' Trainer and quantizers take seconds."""
    if name in ("SwapCallback", "trainer_optimizer"):
        from onepass.integrations.transformers import trainer

        return getattr(trainer, name)
    if name == "QuantizationConfig":
        from onepass.integrations.transformers import quantization

        return quantization.QuantizationConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
