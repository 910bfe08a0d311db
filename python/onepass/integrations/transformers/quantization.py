"""Quantised models by `from_pretrained`: quantised as they are loaded, saved and loaded again, and
checkpoints that other libraries quantised.

    config = QuantizationConfig("int4")
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    print(model.hf_quantizer.report)

transformers gives a quantizer each tensor of a checkpoint, on the CPU, as it is read. The layer
takes the linear layer's place at that moment, so that no more than one weight is held beside the
quantised ones. A layer that is in the checkpoint as several tensors comes as all of them.
"""

from __future__ import annotations

import collections
import copy
import json
import re
from collections.abc import Mapping, Sequence

import torch
import transformers
from torch import Tensor, nn

try:
    from transformers.core_model_loading import ConversionOps, WeightConverter
except ImportError:
    raise ImportError(
        "onepass.integrations.transformers.quantization: transformers must convert weights as it "
        f"reads them, got version {transformers.__version__}: pip install --upgrade transformers"
    ) from None
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from onepass.functional.quantized_linear import FORMATS
from onepass.integrations.transformers import quantized_experts
from onepass.nn.quantized_linear import (
    QuantizedLinear,
    _check_activations,
    _check_weights,
)
from onepass.quantizing import checkpoints, engine
from onepass.quantizing.report import QuantizationReport
from onepass.swapping.walk import Choice, Found, globs, walk

METHOD = "onepass"
_OWN_NAMES = (
    "codes",
    "scales",
    "shifts",
    "input_order",
    "outlier_columns",
    "outliers",
    "_extra_state",
)
_EXPERTS = "mxfp4"  # the method whose layers are experts


@register_quantization_config(METHOD)
class QuantizationConfig(QuantizationConfigMixin):
    """`onepass.quantize` for transformers' `from_pretrained`: layers are quantised as they are
    loaded.

    For a checkpoint that is quantised already, by onepass or by another library, it says that
    onepass reads it: codes stay as they are, and the arguments do not count.
    `model.hf_quantizer.report` says what was done.

    Args:
        weights, group_size, activations, include, exclude, skip_head: as in `onepass.quantize`.

    Raises:
        ValueError: an argument is none of those.

    Examples:
        >>> import tempfile, transformers
        >>> from onepass.integrations.transformers import QuantizationConfig
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> transformers.LlamaForCausalLM(config).save_pretrained(path := tempfile.mkdtemp())
        >>> model = transformers.AutoModelForCausalLM.from_pretrained(path,
        ...     quantization_config=QuantizationConfig("int8"))
        >>> model.hf_quantizer.report.summary()
        'onepass.quantize: 7 to int8, 112 KiB to 29.8 KiB (3.8 times smaller), 1 skipped'
    """

    def __init__(
        self,
        weights: str = "int4",
        *,
        group_size: int | None = None,
        activations: str | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        skip_head: bool = True,
        experts: bool = False,
        quant_method: str = METHOD,
    ):
        _check_weights(weights)
        _check_activations(activations, weights, True)
        for name, given in (("include", include), ("exclude", exclude)):
            globs(name, given, "quantize")
        self.quant_method = METHOD
        self.weights, self.group_size, self.activations = weights, group_size, activations
        self.include, self.exclude, self.skip_head = include, exclude, skip_head
        self.experts = experts  # of gpt-oss, are quantised too
        self._checkpoint: tuple[str, dict] | None = None  # another method and its config

    def to_dict(self) -> dict:
        """JSON-able arguments."""
        return {
            name: copy.deepcopy(value)
            for name, value in vars(self).items()
            if not name.startswith("_")
        }

    def _of_checkpoint(self, given: Mapping) -> QuantizationConfig:
        """This config, to read a checkpoint of another method.

        Raises:
            ValueError: none of its layers can be read.
        """
        method = given.get("quant_method")
        bits = next((n for n in (4, 8) if given.get(f"load_in_{n}bit")), None)
        if bits is not None:
            method = f"bitsandbytes_{bits}bit"
        method = getattr(method, "value", method)
        known = (*checkpoints.READERS, _EXPERTS)
        if method not in known:
            raise ValueError(
                f"QuantizationConfig: the checkpoint's quant_method must be {METHOD} or one of "
                f"{', '.join(known)}, got {method!r}"
            )
        if method in checkpoints.READERS:
            checkpoints.check_config(method, given)
        made = copy.copy(self)
        made._checkpoint = method, dict(given)
        return made


def _read_by_ours_if_asked() -> None:
    """Lets `from_pretrained(quantization_config=QuantizationConfig())` read checkpoints of other
    methods, which transformers refuses as a contradiction."""
    original = AutoHfQuantizer.merge_quantization_configs

    def merge_quantization_configs(quantization_config, quantization_config_from_args):
        ours = quantization_config_from_args
        if isinstance(ours, QuantizationConfig):
            given = quantization_config
            given = dict(given if isinstance(given, Mapping) else given.to_dict())
            if given.get("quant_method") != METHOD:
                return ours._of_checkpoint(given)
        return original(quantization_config, ours)

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge_quantization_configs)


_read_by_ours_if_asked()


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """The quantizer that transformers makes of a `QuantizationConfig`.

    Attributes:
        report: what was quantised, its bytes, and what was not, and why; as of `onepass.quantize`.
    """

    quantization_config: QuantizationConfig
    report: QuantizationReport

    def __init__(self, quantization_config: QuantizationConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.method, self.checkpoint = quantization_config._checkpoint or (METHOD, {})
        self._taken: dict[str, Found] = {}  # by each name; that are not quantised yet
        self._stored: set[str] = set()  # a checkpoint's quantised layers by its names
        self._read: set[str] = set()  # those that were read, by the model's
        self._metadata: dict[str, str] = {}

    # ---- before and after loading ----------------------------------------------------------------
    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        config = self.quantization_config
        if self.pre_quantized:
            if config.experts or self.method == _EXPERTS:
                quantized_experts.put(model)
            self.report = QuantizationReport(model, config.weights)
            self._read_headers(checkpoint_files or ())
            return
        choice = Choice(
            globs("include", config.include, "quantize"),
            globs("exclude", config.exclude, "quantize"),
            None,
            None,
        )
        self.report, taken = engine.choose(model, choice, config.skip_head, **self._of_layer())
        self._taken = {name: item for item in taken for name in item.names}

    def _read_headers(self, files: Sequence[str]) -> None:
        """Notes which layers a checkpoint has quantised."""
        from safetensors import safe_open

        ends = re.compile("|".join(self._patterns()))
        for file in files:
            if str(file).endswith(".safetensors"):
                with safe_open(file, framework="pt") as opened:
                    self._metadata |= opened.metadata() or {}
                    found = ((key, ends.search(key)) for key in opened.keys())
                    self._stored |= {
                        key[: end.start()]
                        for key, end in found
                        if end and not key.endswith(".weight")
                    }

    def _process_model_after_weight_loading(self, model, **kwargs):
        for name in list(self._taken):  # what had no weight of its own in the checkpoint
            if name in self._taken:
                self.quantize(model, name)
        self._untie(model)
        found = walk(model)
        layers = [item.module for item in found if isinstance(item.module, QuantizedLinear)]
        for layer in layers:
            vars(layer).pop("weight", None)
            if layer.bias is not None and not getattr(layer.bias, "_is_hf_initialized", False):
                nn.init.zeros_(layer.bias)
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [
            made
            for made in conversions
            if not any(isinstance(op, _Read) for op in getattr(made, "operations", ()))
        ]
        if self.pre_quantized:
            self._check_all_were_read(model)
            done = {entry["name"] for entry in self.report.quantized}
            for item in found:
                if engine.is_linear(item.module) and not done & set(item.names):
                    self.report.skip(item, "is not quantised in the checkpoint")
        if self.method != METHOD:
            self._become_ours(model, layers)
        self.report.notes += engine.told_peft(model)
        return model

    def _untie(self, model: nn.Module) -> None:
        """Lets a quantised head and the embedding whose weight it had go their ways, in the config
        too, so that the model is saved and loaded with both."""
        tied = model.all_tied_weights_keys
        heads = {f"{entry['name']}.weight" for entry in self.report.quantized} & set(tied)
        for name in heads:
            del tied[name]
            model.config.get_text_config(decoder=True).tie_word_embeddings = False
            model.config.tie_word_embeddings = False

    def _check_all_were_read(self, model: nn.Module) -> None:
        """
        Raises:
            RuntimeError: layers of the model's body are quantised in the checkpoint, and none of
                its linear layers took them: their weights would be random.
        """
        body, prefix = model.base_model, f"{model.base_model_prefix}."
        # Names in a checkpoint may be older ones, so layers are counted.
        stored = {
            name
            for name in self._stored
            if name.startswith(prefix) or name.partition(".")[0] in body._modules
        }
        if len(stored) > len(self._read):
            names = {name.removeprefix(prefix) for name in self._read}
            lost = sorted(name for name in stored if name.removeprefix(prefix) not in names)
            raise RuntimeError(
                f"QuantizationConfig: {len(stored) - len(self._read)} quantised layers of the "
                f"checkpoint must be linear layers of {type(model).__name__}, got {lost[0]} and "
                "others without one"
            )

    def _become_ours(self, model: nn.Module, layers: list[QuantizedLinear]) -> None:
        """Makes a checkpoint of another method one that onepass saves and loads."""
        formats = collections.Counter(layer.weights for layer in layers)
        weights = formats.most_common(1)[0][0] if formats else "int8"
        of_input = {layer.activations for layer in layers if layer.weights == "int8"}
        self._is_mixed = len(of_input) > 1
        self.report.weights = "/".join(sorted(formats)) or weights
        self.quantization_config = QuantizationConfig(
            weights,
            activations=next(iter(of_input)) if weights == "int8" and len(of_input) == 1 else None,
            experts=self.method == _EXPERTS,
        )
        model.config.quantization_config = self.quantization_config

    # ---- layers ----------------------------------------------------------------------------------
    def _of_layer(self) -> dict:
        config = self.quantization_config
        return {name: getattr(config, name) for name in ("weights", "group_size", "activations")}

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        name, _, kind = param_name.rpartition(".")
        return kind == "weight" and name in self._taken

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def quantize(self, model: nn.Module, name: str) -> None:
        """Quantises a layer by name."""
        item = self._taken[name]
        layer = engine.quantized(item.module, **self._of_layer())
        self.replace(model, item, layer)
        for other in item.names:
            del self._taken[other]

    def replace(self, model: nn.Module, item: Found, layer: QuantizedLinear) -> None:
        """Puts a quantised layer in the place of a linear one, and into the report."""
        layer._is_hf_initialized = True
        # Models that draw what a checkpoint lacks read the weights of their layers by name.
        vars(layer)["weight"] = stand_in = torch.empty(0, device="cpu")
        stand_in._is_hf_initialized = True
        self.report.add(item, layer, None)
        engine.exchange(model, item.module, layer)

    def _patterns(self) -> list[str]:
        """Regular expressions of the ends of the names that a quantised layer has."""
        if self.method == METHOD:
            names = _OWN_NAMES
        elif self.method == _EXPERTS:
            names = quantized_experts.STORED
        else:
            names = checkpoints.READERS[self.method].names
        return [rf"\.{re.escape(name)}$" for name in names]

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        if self.method == _EXPERTS:
            patterns = self._patterns()
            return [
                WeightConverter(patterns[i : i + 2], f".{name}.0.weight", [_Read(self)])
                for i, name in zip((0, 2), quantized_experts.WEIGHTS, strict=True)
            ]
        return [WeightConverter(self._patterns(), ".weight", [_Read(self)])]

    def update_weight_conversions(self, weight_conversions, model):
        return [*weight_conversions, *self.get_weight_conversions()]

    def read(self, model: nn.Module, name: str, tensors: dict[str, Tensor]) -> None:
        """Puts the layer that a checkpoint's tensors make in the place of the linear one.

        Raises:
            ValueError: the tensors make no layer that the kernels know, or one of another shape.
        """
        module = model.get_submodule(name)
        shape = engine.weight_of(module).shape
        if self.method == METHOD:
            layer = self._own_layer(tensors, module, shape)
        else:
            if any(tensor.is_meta for tensor in tensors.values()):
                raise ValueError(
                    f"QuantizationConfig: device_map must be of devices that hold {name}, got meta"
                )
            stored = checkpoints.READERS[self.method].read(tensors, self._facts(module, name))
            dtype = engine.weight_of(module).dtype
            layer = checkpoints.layer_of(stored, module.bias, dtype)
        self._put(model, name, module, layer, shape)

    def _put(self, model, name, module, layer, shape) -> None:
        if (layer.out_features, layer.in_features) != tuple(shape):
            raise ValueError(
                f"QuantizationConfig: {name} must have a weight of shape {tuple(shape)}, got "
                f"{(layer.out_features, layer.in_features)} in the checkpoint"
            )
        if not isinstance(module, nn.Linear):
            layer.plain_class = type(module)
        self.replace(model, Found(module, [name], []), layer)

    def read_experts(self, model: nn.Module, name: str, tensors: dict[str, Tensor]) -> None:
        """Puts one layer for each expert in the place of the linear ones."""
        layers = checkpoints.read_mxfp4(tensors, self.checkpoint)
        for i, stored in enumerate(layers):
            expert = f"{name.removesuffix('.0')}.{i}"
            module = model.get_submodule(expert)
            weight = engine.weight_of(module)
            layer = checkpoints.layer_of(stored, None, weight.dtype)
            self._put(model, expert, module, layer, weight.shape)

    def _own_layer(self, tensors, module: nn.Module, shape) -> QuantizedLinear:
        config, scales, extra = self.quantization_config, tensors["scales"], tensors["_extra_state"]
        out_features, in_features = shape
        weights, group_size = config.weights, in_features // len(scales)
        if not extra.is_meta:
            number, group_size = extra.tolist()
            weights = FORMATS[number]
        in_rows = weights == "int8" and group_size == in_features
        layer = QuantizedLinear(
            in_features,
            out_features,
            False,
            weights=weights,
            group_size=group_size,
            activations=config.activations if in_rows else None,
            device="meta",
            dtype=engine.weight_of(module).dtype,
            scales_dtype=scales.dtype,
            input_order=tensors.get("input_order"),
            outlier_columns=tensors.get("outlier_columns"),
        )
        layer.load_state_dict(tensors, assign=True)
        layer.bias = module.bias
        return layer

    def _facts(self, module: nn.Module, name: str) -> Mapping:
        """The facts of a layer in a checkpoint's config and metadata."""
        if self.method == "compressed-tensors":
            return {"scheme": _scheme_of(self.checkpoint, module, name)}
        if self.method == "torchao":
            prefix = next((of for of in self._metadata if of.endswith(f"{name}.weight")), "")
            facts = json.loads(self._metadata.get(prefix, "{}"))
            of_input = facts.get("_data", {}).get("act_quant_kwargs")
            return {"tensor": facts.get("_type"), "quantizes_input": of_input is not None}
        return self.checkpoint

    # ---- what transformers asks ------------------------------------------------------------------
    def _dequantize(self, model, dtype=None):
        quantized_experts.dequantize(model)
        engine.dequantize(model)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        return not getattr(self, "_is_mixed", False)

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Quantises a weight that was read."""

    def __init__(self, hf_quantizer: Quantizer):
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict, model=None, full_layer_name=None, missing_keys=None, **kwargs):
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        name = full_layer_name.removesuffix(".weight")
        module = self.hf_quantizer._taken[name].module
        module.weight = nn.Parameter(value, requires_grad=False)
        self.hf_quantizer.quantize(model, name)
        missing_keys.discard(full_layer_name)
        return {}


class _Read(ConversionOps):
    """Makes a quantised layer of the tensors that were read for it."""

    def __init__(self, hf_quantizer: Quantizer):
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo):
        return self

    def convert(self, input_dict, model=None, full_layer_name=None, missing_keys=None, **kwargs):
        tensors = {
            pattern[2:-1].replace("\\", ""): value[0] if isinstance(value, list) else value
            for pattern, value in input_dict.items()
        }
        if list(tensors) == ["weight"]:  # is not quantised
            own = model.get_parameter_or_buffer(full_layer_name)
            return {full_layer_name: tensors["weight"].to(own.dtype)}
        name = full_layer_name.removesuffix(".weight")
        if self.hf_quantizer.method == _EXPERTS:
            tensors = {of.rpartition("_")[2]: tensor for of, tensor in tensors.items()}
            self.hf_quantizer.read_experts(model, name, tensors)
            stem = full_layer_name.removesuffix(".0.weight")
            self.hf_quantizer._read.add(stem.rpartition(".")[0])
            missing_keys -= {key for key in missing_keys if key.startswith(f"{stem}.")}
        else:
            self.hf_quantizer.read(model, name, tensors)
            self.hf_quantizer._read.add(name)
        missing_keys.discard(full_layer_name)
        return {}


def _scheme_of(config: Mapping, module: nn.Module, name: str) -> Mapping:
    """The scheme of compressed-tensors that a layer has.

    Raises:
        ValueError: it has none.
    """
    kinds = {cls.__name__ for cls in type(module).__mro__}
    for scheme in config.get("config_groups", {}).values():
        for target in scheme.get("targets", ()):
            is_pattern = target.startswith("re:") and re.match(target[3:], name)
            if is_pattern or target in kinds or target == name:
                return scheme
    raise ValueError(f"QuantizationConfig: a scheme of config_groups must name {name}, got none")
