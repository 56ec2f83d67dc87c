"""Architectures of ``transformers``: make a module and its inputs from a ``config.json``."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from planner.models.captured import CapturedInput
from planner.models.config import ModelConfigError
from planner.models.registry import configuration
from ullage.capture.inputs import BY_HAND, HEADS, Kind, image_tokens
from ullage.capture.records import CaptureError

# Names of the maximum sequence length; the first one that a configuration has counts.
_POSITIONS: Final = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
# Rotary positions, which have no maximum: sequences may be longer than in the model's training.
_ROTATIONS: Final = ("rope_parameters", "rope_theta")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A configuration and the class to train.

    Attributes:
        config: configuration of ``transformers``.
        auto: the auto class of ``transformers`` that makes the module.
        kind: the way to call the module.
    """

    config: Any
    auto: Any
    kind: Kind

    def make(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Make the module with random weights of a type. The default is that of the configuration."""
        module: nn.Module = self.auto.from_config(self.config, **({} if dtype is None else {"dtype": dtype}))
        return module

    def seq_len(self, given: int | None, usual: int) -> int:
        """Return the tokens of a sequence: ``given``, or else ``usual``, limited by the model's maximum.

        Raises:
            CaptureError: the model has learned fewer positions than ``given``, or takes no tokens.
        """
        text, name = self.config.get_text_config(), self.config.model_type
        if given and not self.kind.has_tokens:
            raise CaptureError(f"{name} takes no tokens, but the sequence length is {given}; leave it out")
        most = next((most for limit in _POSITIONS if (most := getattr(text, limit, None))), None)
        is_rotary = any(hasattr(text, rotation) for rotation in _ROTATIONS)
        if given and most and given > most and not is_rotary:
            raise CaptureError(
                f"{name} has learned {most} positions, but the sequence length is {given}; give at most {most}"
            )
        taken = image_tokens(self.config) if self.kind.has_images else 0
        if given and given <= taken:
            raise CaptureError(
                f"{name}: an image takes {taken} tokens of a sequence, so {given} leave none for text; give more"
            )
        return given or min(max(usual, 2 * taken), most or usual)

    def inputs(self, micro_batch: int, seq_len: int, *, masked: bool = False) -> tuple[CapturedInput, ...]:
        """Return the inputs of the module; if ``masked``, with an attention mask for its tokens.

        Raises:
            CaptureError: ``masked`` is given, but the module takes no tokens, or other inputs beside them.
        """
        made = self.kind.inputs(self.config, micro_batch, seq_len)
        if not masked:
            return made
        ids = next((spec for spec in made if spec.name == "input_ids" and not spec.begins), None)
        if ids is None:
            raise CaptureError(
                f"{self.config.model_type} takes {', '.join(spec.name for spec in made)}, for which Ullage knows no "
                f"mask; leave it out, or {BY_HAND}"
            )
        return (*made, ids.model_copy(update={"name": "attention_mask"}))


def architecture(text: str | Path) -> Architecture:
    """Return the architecture of a ``config.json``: a file, the file in a folder, or that of a name.

    Raises:
        ModelConfigError: the file does not exist, or is not a configuration.
        CaptureError: ``transformers`` does not know the architecture, or Ullage cannot make its inputs.
    """
    import transformers  # noqa: PLC0415 - takes a second, which models of others need not wait for

    file = str(text)
    data = configuration(file)
    config = _config(data, file)
    named = (data.get("architectures") or [""])[0]
    made = {head: _names(getattr(transformers, head), config) for head in HEADS}
    fitting = [head for head, names in made.items() if named in names and named]
    if not fitting and (not named or named.endswith("Model")):  # the class has no head
        fitting = [head for head, names in made.items() if names]
    if not fitting:
        raise CaptureError(f"{file}: Ullage cannot make the inputs of {named or config.model_type}; {BY_HAND}")
    names = made[fitting[0]]
    config.architectures = [named if named in names else names[0]]  # choose one if there are several
    return Architecture(config, getattr(transformers, fitting[0]), HEADS[fitting[0]])


def _names(auto: Any, config: Any) -> tuple[str, ...]:
    """Return the names of all classes that an auto class can make for a configuration."""
    found = auto._model_mapping.get(type(config), None)
    classes = found if isinstance(found, tuple) else (found,)
    return tuple(made.__name__ for made in classes if made is not None)


def _config(data: Mapping[str, Any], file: str) -> Any:
    import transformers  # noqa: PLC0415 - as above

    if (model_type := data.get("model_type")) is None:
        raise CaptureError(f"{file} has no model_type; give the config.json of a model of transformers, or {BY_HAND}")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise CaptureError(
            f"{file}: transformers {transformers.__version__} does not know model_type {model_type!r}; install a newer "
            f"one, or {BY_HAND}"
        )
    try:
        config = transformers.AutoConfig.for_model(**data)
    except Exception as error:  # each configuration checks its fields in its own way
        what = " ".join(str(error).split())
        raise ModelConfigError(f"{file}: {what}; correct the configuration of this {model_type}") from error
    config.use_cache = False
    return config
