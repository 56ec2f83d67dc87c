"""Inputs of architectures of ``transformers``, made from their configurations."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from planner.models.captured import CapturedInput
from ullage.capture.records import CaptureError

BY_HAND: Final = "give --model package.module:function and --input-shape"
_IMAGE_SIDE = 224  # pixels, if a configuration has no size
_SAMPLES = 16_000  # one second of sound
_MOST_IMAGE_SIDE = 16  # maximum tokens along a side of an image whose size is free

Inputs = tuple[CapturedInput, ...]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to call a model.

    Attributes:
        parts: functions that make inputs from a configuration, a micro-batch and a number of tokens.
        has_tokens: whether the number of tokens is free.
        has_images: whether an image takes some of the tokens.
    """

    parts: tuple[Callable[[Any, int, int], Inputs], ...]
    has_tokens: bool = True
    has_images: bool = False

    def inputs(self, config: Any, micro_batch: int, seq_len: int) -> Inputs:
        """Return the inputs of a model."""
        return tuple(spec for part in self.parts for spec in part(config, micro_batch, seq_len))


@dataclasses.dataclass(frozen=True)
class Example:
    """What a model is called with in the user's loop.

    Attributes:
        args, kwargs: of the call. Tensors may be anywhere inside them, also several times.
        tensors: these tensors, in the order of the captured inputs; ``None``: it is called with these alone.
        values: values of inputs, by number of the input, which the model may need; others are assumed, see
            [Note: Assumed values] in :mod:`ullage.capture.fakes`.
        all_hold: whether comparisons of assumed values are assumed to hold, as a model's checks of its own values do.
        step: a step of the user's loop up to the loss, which is called with the model and the arguments; ``None``: the
            model is called.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Sequence[Tensor] | None = None
    values: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    all_hold: bool = False
    step: Callable[..., Any] | None = None

    def known(self, inputs: Inputs, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return the inputs whose values count, by number: those of this example, and what rows begin with."""
        found = {number: begun(spec) for number, spec in enumerate(inputs) if spec.begins}
        found |= {number: value for number, value in self.values.items() if value.shape == inputs[number].shape}
        return {number: value.to(dtype) if value.is_floating_point() else value for number, value in found.items()}

    def called_with(self, inputs: Inputs, others: Sequence[Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of the call, with a tensor for each captured input."""
        if self.tensors is None:
            named = [(spec.name, other) for spec, other in zip(inputs, others, strict=True)]
            return [other for name, other in named if not name], {name: other for name, other in named if name}
        replaced = {id(tensor): other for tensor, other in zip(self.tensors, others, strict=True)}
        with _disable_current_modes():
            return copy.deepcopy((self.args, self.kwargs), replaced)


NO_EXAMPLE: Final = Example()


_INTEGERS: Final = {
    getattr(torch, name): name
    for name in CapturedInput.model_fields["dtype"].annotation.__args__  # type: ignore[union-attr]
    if name != "float"
}


def input_of(name: str, tensor: Tensor) -> CapturedInput | None:
    """Return an input like a tensor; ``None`` if it has a type that no plan knows."""
    dtype: Any = "float" if tensor.is_floating_point() else _INTEGERS.get(tensor.dtype)
    return None if dtype is None else CapturedInput(name=name, shape=tuple(tensor.shape), dtype=dtype)


def _ids(name: str, *shape: int, begins: tuple[tuple[int, int], ...] = ()) -> CapturedInput:
    return CapturedInput(name=name, shape=shape, dtype="int64", begins=begins)


def _values(name: str, *shape: int) -> CapturedInput:
    return CapturedInput(name=name, shape=shape)


def _tokens(_config: Any, micro_batch: int, seq_len: int) -> Inputs:
    return (_ids("input_ids", micro_batch, seq_len),)


def _targets(_config: Any, micro_batch: int, seq_len: int) -> Inputs:
    return (_ids("labels", micro_batch, seq_len),)


def _label(config: Any, micro_batch: int, _seq_len: int) -> Inputs:
    """Return the label of a classifier: a class, a value for each class, or the value of a single class."""
    if config.problem_type == "multi_label_classification":
        return (_values("labels", micro_batch, config.num_labels),)
    if config.num_labels == 1 or config.problem_type == "regression":
        return (_values("labels", micro_batch, *([config.num_labels] if config.num_labels > 1 else [])),)
    return (_ids("labels", micro_batch),)


def _answer(_config: Any, micro_batch: int, _seq_len: int) -> Inputs:
    return tuple(_ids(f"{end}_positions", micro_batch) for end in ("start", "end"))


def _pixels(config: Any, micro_batch: int, _seq_len: int = 0) -> Inputs:
    size = getattr(config, "image_size", None) or _IMAGE_SIDE
    height, width = (size, size) if isinstance(size, int) else size
    return (_values("pixel_values", micro_batch, getattr(config, "num_channels", 3), height, width),)


def _sound(config: Any, micro_batch: int, _seq_len: int) -> Inputs:
    """Return a spectrogram of the model's length, or a second of samples."""
    has = config.to_dict()
    if "num_mel_bins" in has and "max_source_positions" in has:  # Whisper halves the frames before its encoder
        return (_values("input_features", micro_batch, config.num_mel_bins, 2 * config.max_source_positions),)
    if "num_mel_bins" in has and "max_length" in has:
        return (_values("input_values", micro_batch, config.max_length, config.num_mel_bins),)
    if "input_feat_per_channel" in has:
        return (_values("input_features", micro_batch, config.max_source_positions, config.input_feat_per_channel),)
    if "conv_stride" in has or config.model_type.startswith("moonshine"):
        return (_values("input_values", micro_batch, _SAMPLES),)
    raise CaptureError(f"Ullage does not know what sound {config.model_type} takes; {BY_HAND}")


def _images_and_text(config: Any, micro_batch: int, seq_len: int) -> Inputs:
    """Return one image at the beginning of each sequence. Other architectures get only text."""
    if (sized := _SIZED_IMAGES.get(config.model_type)) is not None:
        return sized(config, micro_batch, seq_len)
    if (taken := image_tokens(config)) == 0:
        return _TEXT.inputs(config, micro_batch, seq_len)
    begins = ((_image_id(config), taken),)
    types = _TYPES.get(config.model_type)
    more = (_ids("token_type_ids", micro_batch, seq_len, begins=types(taken, seq_len)),) if types else ()
    return (
        _ids("input_ids", micro_batch, seq_len, begins=begins),
        *_pixels(config.vision_config, micro_batch),
        *more,
        *_targets(config, micro_batch, seq_len),
    )


def _listed_images(config: Any, micro_batch: int, seq_len: int) -> Inputs:
    """Return a list of one image for each sequence. Its values are not zero, because models skip images of zeros.

    Some default configurations have images that cannot be divided into patches. Then the inputs are only text.
    """
    if (taken := image_tokens(config)) == 0:
        return _TEXT.inputs(config, micro_batch, seq_len)
    (image,) = _pixels(config.vision_config, micro_batch)
    shape = micro_batch, 1, *image.shape[1:]
    return (
        _ids("input_ids", micro_batch, seq_len, begins=((config.image_token_id, taken),)),
        CapturedInput(name="pixel_values", shape=shape, begins=((1, 1),)),
        *_targets(config, micro_batch, seq_len),
    )


def _measured_images(config: Any, micro_batch: int, seq_len: int) -> Inputs:
    """Return images with their sizes, as large as fits into half of the sequence."""
    vision = config.vision_config
    merged = min(math.isqrt(max(seq_len // 2, 1)), _MOST_IMAGE_SIDE)
    side = merged * config.spatial_merge_size * vision.patch_size
    return (
        _ids("input_ids", micro_batch, seq_len, begins=((_image_id(config), merged**2),)),
        _values("pixel_values", micro_batch, vision.num_channels, side, side),
        _ids("image_sizes", micro_batch, 2, begins=((side, 2),)),
        *_targets(config, micro_batch, seq_len),
    )


def _free_images(config: Any, micro_batch: int, seq_len: int) -> Inputs:
    """Return images as patches, as large as fits into half of the sequence."""
    vision = config.vision_config
    merged = min(math.isqrt(max(seq_len // 2, 1)), _MOST_IMAGE_SIDE)
    side = merged * vision.spatial_merge_size
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    taken = merged**2
    return (
        _ids("input_ids", micro_batch, seq_len, begins=((config.image_token_id, taken),)),
        _ids("mm_token_type_ids", micro_batch, seq_len, begins=((1, taken), (0, seq_len - taken))),
        _values("pixel_values", micro_batch, side**2, width),
        _ids("image_grid_thw", micro_batch, 3, begins=((1, 1), (side, 2))),
        *_targets(config, micro_batch, seq_len),
    )


def image_tokens(config: Any) -> int:
    """Return the tokens of one image; 0 if the image is as large as fits, or if the number is not known."""
    count = _IMAGE_TOKENS.get(config.model_type)
    return count(config) if count else 0


def _image_id(config: Any) -> int:
    found: int = next(
        getattr(config, name) for name in ("image_token_id", "image_token_index") if hasattr(config, name)
    )
    return found


def _patches(config: Any) -> int:
    vision = config.vision_config
    return int((vision.image_size // vision.patch_size) ** 2)


def _shuffled_tokens(config: Any) -> int:
    side, rest = divmod(config.vision_config.image_size // config.vision_config.patch_size, config.scale_factor)
    return 0 if rest else int(side**2)


_SIZED_IMAGES: Final[dict[str, Callable[[Any, int, int], Inputs]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _free_images),
    **dict.fromkeys(("idefics3", "smolvlm"), _listed_images),
    "mistral3": _measured_images,
}
_IMAGE_TOKENS: Final[dict[str, Callable[[Any], int]]] = {
    **dict.fromkeys(("idefics3", "smolvlm"), _shuffled_tokens),
    "gemma3": lambda config: config.mm_tokens_per_image,
    "llava": lambda config: _patches(config) + int(config.vision_feature_select_strategy == "full"),
    "paligemma": _patches,
}
# Tokens with bidirectional attention: those of an image. PaliGemma has them also for a prompt, which is empty here.
_TYPES: Final[dict[str, Callable[[int, int], tuple[tuple[int, int], ...]]]] = {
    "gemma3": lambda taken, seq_len: ((1, taken), (0, seq_len - taken)),
    "paligemma": lambda taken, seq_len: ((0, taken), (1, seq_len - taken)),
}

_TEXT: Final = Kind((_tokens, _targets))
HEADS: Final[dict[str, Kind]] = {
    "AutoModelForSeq2SeqLM": _TEXT,
    "AutoModelForSpeechSeq2Seq": Kind((_sound, _targets)),
    "AutoModelForMaskedLM": _TEXT,
    "AutoModelForImageTextToText": Kind((_images_and_text,), has_images=True),
    "AutoModelForCausalLM": _TEXT,
    "AutoModelForImageClassification": Kind((_pixels, _label), has_tokens=False),
    "AutoModelForAudioClassification": Kind((_sound, _label), has_tokens=False),
    "AutoModelForSequenceClassification": Kind((_tokens, _label)),
    "AutoModelForTokenClassification": _TEXT,
    "AutoModelForQuestionAnswering": Kind((_tokens, _answer)),
}
"""Auto classes of ``transformers`` with the way to call them.

The class in the configuration counts, or else the first one that exists.
"""


def begun(spec: CapturedInput, rest: Tensor | None = None) -> Tensor:
    """Return an input's values: first its given beginning, then those of ``rest``, or zeros.

    Values of ``rest`` that also occur in the beginning are replaced.
    """
    dtype = torch.float32 if spec.dtype == "float" else getattr(torch, spec.dtype)
    row = [value for value, count in spec.begins for _ in range(count)]
    reserved = {value for value, _ in spec.begins}
    free = next(value for value in itertools.count() if value not in reserved)
    values = torch.full(spec.shape, free, dtype=dtype) if rest is None else rest.clone()
    for value in reserved:
        values[values == value] = free
    values[:, : len(row)] = torch.tensor(row, dtype=dtype)
    return values


def tensor_of(spec: CapturedInput, dtype: torch.dtype) -> Tensor:
    """Return an input for which only its shape and type count."""
    return torch.zeros(spec.shape, dtype=dtype if spec.dtype == "float" else getattr(torch, spec.dtype))
