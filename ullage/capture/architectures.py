"""Architectures of ``transformers``: from a ``config.json`` to the module, and what it is called with."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn

from hwprofiles.files import read_json
from planner.models.captured import CapturedInput
from planner.models.config import ModelConfigError
from planner.models.huggingface import to_hf_config_dict
from planner.models.registry import resolve_model
from ullage.capture.records import CaptureError

# Names of the most tokens of a sequence; the first that a configuration has counts.
_POSITIONS: Final = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_BY_HAND: Final = "give --model package.module:function and --input-shape"

Shapes = dict[str, tuple[int, ...]]
"""Shapes of inputs by name, without the leading dimension, which is the micro-batch."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A configuration, and the class that is trained.

    Attributes:
        config: of ``transformers``.
        auto: the class of ``transformers`` that makes the module.
        shapes: of the inputs, for a number of tokens.
    """

    config: Any
    auto: Any
    shapes: Callable[[Any, int], Shapes]

    def make(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return the module, with random weights of a type; left out, of the configuration's."""
        module: nn.Module = self.auto.from_config(self.config, **({} if dtype is None else {"dtype": dtype}))
        return module

    def seq_len(self, asked: int | None, usual: int) -> int:
        """Return the tokens of a sequence: those that were asked for, or ``usual``, or as many as the model takes.

        Raises:
            CaptureError: it does not take so many, or none at all.
        """
        text, name = self.config.get_text_config(), self.config.model_type
        if asked and self.shapes(self.config, 1) == self.shapes(self.config, 2):
            raise CaptureError(f"{name} takes no tokens, but {asked} a sequence are asked for; leave the length out")
        most = next((most for limit in _POSITIONS if (most := getattr(text, limit, None))), None)
        if asked and most and asked > most:
            raise CaptureError(f"{name} takes at most {most} tokens a sequence, not {asked}; ask for fewer")
        return asked or min(usual, most or usual)

    def inputs(self, micro_batch: int, seq_len: int) -> tuple[CapturedInput, ...]:
        """Return what the module is called with; identifiers and labels are whole numbers."""
        whole = {"input_ids", "labels"}
        return tuple(
            CapturedInput(name=name, shape=(micro_batch, *shape), dtype="int64" if name in whole else "float")
            for name, shape in self.shapes(self.config, seq_len).items()
        )


def architecture(text: str | Path) -> Architecture:
    """Return what a ``config.json``, or the one in a folder, or a packaged model of this name describes.

    Raises:
        ModelConfigError: there is none, or it is no configuration.
        CaptureError: ``transformers`` does not know it, or its inputs cannot be made from it.
    """
    path = Path(text).expanduser()
    file = path / "config.json" if path.is_dir() else path
    data: Any
    if path.exists():
        data = read_json(file, ModelConfigError, "give a Hugging Face config.json")
    else:
        data = to_hf_config_dict(resolve_model(str(text)))
    config = _config(data, file)
    if hasattr(config, "vision_config"):
        raise CaptureError(
            f"{file}: {config.model_type} takes images beside text, and no configuration says how many; {_BY_HAND}"
        )
    named = (data.get("architectures") or [""])[0]
    made = {auto: getattr(auto._model_mapping.get(type(config), None), "__name__", "") for auto in _HEADS}
    fitting = [auto for auto, name in made.items() if name and name == named]
    if not fitting and (not named or named.endswith("Model")):  # without a head
        fitting = [auto for auto, name in made.items() if name]
    if not fitting:
        raise CaptureError(f"{file}: Ullage cannot make the inputs of {named or config.model_type}; {_BY_HAND}")
    return Architecture(config, fitting[0], _HEADS[fitting[0]])


def _config(data: Mapping[str, Any], file: Path) -> Any:
    if (model_type := data.get("model_type")) not in transformers.CONFIG_MAPPING:
        raise CaptureError(
            f"{file}: transformers {transformers.__version__} does not know model_type {model_type!r}; install a newer "
            f"one, or {_BY_HAND}"
        )
    try:
        config = transformers.AutoConfig.for_model(**data)
    except Exception as error:  # each configuration checks its fields in its own way
        what = " ".join(str(error).split())
        raise ModelConfigError(f"{file}: {what}; correct the configuration of this {model_type}") from error
    config.use_cache = False
    return config


def _text(_config: Any, seq_len: int) -> Shapes:
    return {"input_ids": (seq_len,), "labels": (seq_len,)}


def _speech(config: Any, seq_len: int) -> Shapes:
    """Whisper halves the frames of a spectrogram before its encoder."""
    return {"input_features": (config.num_mel_bins, 2 * config.max_source_positions), "labels": (seq_len,)}


def _images(config: Any, _seq_len: int) -> Shapes:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": (getattr(config, "num_channels", 3), height, width), "labels": ()}


def _classes(_config: Any, seq_len: int) -> Shapes:
    return {"input_ids": (seq_len,), "labels": ()}


# What trains an architecture, and its inputs: the class that the configuration names, or else the first that there is.
_HEADS: Final[dict[Any, Callable[[Any, int], Shapes]]] = {
    transformers.AutoModelForSeq2SeqLM: _text,
    transformers.AutoModelForSpeechSeq2Seq: _speech,
    transformers.AutoModelForMaskedLM: _text,
    transformers.AutoModelForCausalLM: _text,
    transformers.AutoModelForImageClassification: _images,
    transformers.AutoModelForSequenceClassification: _classes,
}
