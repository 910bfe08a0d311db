"""A model of transformers and a batch for it, from a config alone."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable

import torch
from torch import nn

from onepass.tools.errors import BadInput

MOST_TOKENS = 2048  # without --seq: the usual length in training

# Endings of a class's name, whose labels are not the tokens themselves.
_ONE_LABEL = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def maker(path: str, rows: int, tokens: int | None) -> Callable[[], tuple[nn.Module, dict]]:
    """A function that makes the model, its parameters float32, and a batch.

    Raises:
        BadInput: there is no such config, or no model of it that takes tokens or pictures.
    """
    try:
        import transformers
    except ImportError:
        raise BadInput("transformers is missing, which --config needs") from None
    if not os.path.exists(path):
        raise BadInput(f"--config must be a file or a folder with a config.json, got {path!r}")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        text = str(error).splitlines()[0]
        raise BadInput(f"--config must be a config of transformers: {text}") from None
    cls = _class_of(transformers, config)

    def make() -> tuple[nn.Module, dict]:
        model = cls(config)
        return model, _batch(model, rows, tokens)

    return make


def _class_of(transformers, config) -> type[nn.Module]:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForImageClassification",
    ):
        with contextlib.suppress(KeyError, AttributeError):
            return getattr(transformers, auto)._model_mapping[type(config)]
    raise BadInput(
        "--config must name a class of transformers in its architectures, got "
        f"{config.architectures}: --model takes any model"
    )


def _batch(model: nn.Module, rows: int, tokens: int | None) -> dict:
    config, name = model.config, type(model).__name__
    text = config.get_text_config()
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        batch = {
            "pixel_values": torch.randn(rows, config.num_channels, height, width, device="cpu")
        }
        if name.endswith(_ONE_LABEL):
            batch["labels"] = torch.zeros(rows, dtype=torch.int64, device="cpu")
        return batch
    if model.main_input_name != "input_ids":
        raise BadInput(
            f"--config must be of a model of tokens or pictures, got {name}, which takes "
            f"{model.main_input_name}: --model takes any model"
        )
    most = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if tokens is None:
        tokens = min(MOST_TOKENS, most or MOST_TOKENS)
    ids = torch.randint(0, text.vocab_size, (rows, tokens), device="cpu")
    if name.endswith(_ONE_LABEL):
        return {"input_ids": ids, "labels": torch.zeros(rows, dtype=torch.int64, device="cpu")}
    if name.endswith("ForQuestionAnswering"):
        ends = torch.zeros(rows, dtype=torch.int64, device="cpu")
        return {"input_ids": ids, "start_positions": ends, "end_positions": ends}
    if name.endswith("ForTokenClassification"):
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if "labels" in inspect.signature(model.forward).parameters:
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids}  # a model without a head
