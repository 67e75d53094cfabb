"""Models from a transformers config: the architecture that it names, with a batch that fits it."""

# transformers' auto classes take more than their signatures name
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwright.pcg.capture.fake import fake as without_memory
from shardwright.pcg.errors import MachineError, ShardwrightError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Example = tuple[nn.Module, dict[str, Tensor]]


def load_config(path: Path, batch_size: int, seq_len: int, dtype: str, *, fake: bool) -> Example:
    """Return the model of a transformers config, in train mode, and a batch of token ids or pixels with labels.

    With `fake`, weights and batch are fake tensors: a model of any size takes no memory.
    """
    config = _config(path)
    architecture = _architecture(config, path)
    with without_memory() if fake else contextlib.nullcontext():
        try:
            model: nn.Module = architecture._from_config(config, dtype=getattr(torch, dtype))
        except (TypeError, ValueError, AttributeError, ImportError) as error:
            raise ShardwrightError(f"{path}: {architecture.__name__} cannot be built: {error}") from error
        return model.train(), _batch(architecture.__name__, config, batch_size, seq_len, path)


def _config(path: Path) -> PreTrainedConfig:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MachineError("--hf-config needs transformers: pip install transformers") from error
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShardwrightError(f"{path}: cannot read the config: {error.strerror or error}") from error
    except ValueError as error:
        raise ShardwrightError(f"{path}: not a complete JSON file: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ShardwrightError(f"{path}: this is not a transformers config; it has no field 'model_type'")
    kind = values.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **values)
    except (TypeError, ValueError, KeyError) as error:
        raise ShardwrightError(f"{path}: model_type {kind!r} with these values is not understood: {error}") from error
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a cache among the outputs cannot be captured
    return config


def _architecture(config: PreTrainedConfig, path: Path) -> type[PreTrainedModel]:
    import transformers

    names = config.architectures or []
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if not names and type(config) in mapping:
        return mapping[type(config)]
    raise ShardwrightError(
        f"{path}: 'architectures' is {names}, of which transformers {transformers.__version__} knows none; "
        "name one, such as LlamaForCausalLM"
    )


def _batch(architecture: str, config: PreTrainedConfig, batch_size: int, seq_len: int, path: Path) -> dict[str, Tensor]:
    if architecture.endswith("ForImageClassification"):
        return _pixels(config, batch_size)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ShardwrightError(f"{path}: --seq-len {seq_len} is more than max_position_embeddings {longest}; take less")
    ids = torch.randint(1, text.vocab_size, (batch_size, seq_len))
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return {"input_ids": ids, "labels": ids.clone()}
    if architecture.endswith("ForSequenceClassification"):
        return {"input_ids": ids, "labels": torch.randint(config.num_labels, (batch_size,))}
    raise ShardwrightError(
        f"{path}: what a batch of {architecture} looks like is not known; give the model as FILE.py:FUNCTION, which "
        "returns (model, batch)"
    )


def _pixels(config: PreTrainedConfig, batch_size: int) -> dict[str, Tensor]:
    extent = getattr(config, "image_size", 224)
    height, width = extent if isinstance(extent, (list, tuple)) else (extent, extent)
    pixels = torch.randn(batch_size, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (batch_size,))}
