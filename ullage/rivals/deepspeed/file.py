"""Read a configuration of DeepSpeed: the values that a schedule depends on, and the names of other keys."""

import difflib
import functools
import importlib.resources
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError

from hwprofiles.files import read_json
from ullage.rivals.engines.deepspeed_config import Auto, Part, Positive, Zero

AUTO: Final = "auto"


def _value_of(key: str, *, needed: bool = False) -> BeforeValidator:
    """Return what takes the place of a section: the value of its only key that a schedule depends on."""
    return BeforeValidator(
        lambda section: section.get(key, {} if needed else False) if isinstance(section, dict) else section
    )


Enabled = Annotated[bool | Auto, _value_of("enabled")]


class Config(Part):
    """A whole configuration."""

    train_batch_size: Positive | Auto | None = None
    train_micro_batch_size_per_gpu: Positive | Auto | None = None
    gradient_accumulation_steps: Positive | Auto | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] | Auto = 0.0
    zero_optimization: Zero = Zero()
    bf16: Enabled = False
    fp16: Enabled = False
    optimizer: Annotated[str | None, _value_of("type", needed=True)] = None  # its type


def load_config(path: Path) -> Config:
    """Read a file.

    Raises:
        ValueError: the file cannot be read, is not JSON, or has a value that DeepSpeed does not take.
    """
    data = read_json(path, ValueError, "give a ds_config.json")
    if not isinstance(data, dict) or not data.keys() & set(known_keys()["config"]):
        raise ValueError(
            f"{path} has none of DeepSpeed's keys, such as zero_optimization or train_batch_size; give a ds_config.json"
        )
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if not _VARIANTS.fullmatch(str(part)))
        raise ValueError(
            f"{path}: {where} is {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
        ) from error


@functools.cache
def known_keys() -> dict[str, list[str]]:
    """Return the keys of DeepSpeed's configuration, by part."""
    text = importlib.resources.files(__package__).joinpath("keys.json").read_text(encoding="utf-8")
    found: dict[str, list[str]] = json.loads(text)
    return found


def unknown_keys(config: Config) -> list[str]:
    """Return keys that DeepSpeed does not have, each with the key that may have been meant."""
    return [
        f"{path}{name} is not a key of DeepSpeed" + (f" (did you mean {near[0]}?)" if near else "")
        for path, part, known in _parts(config)
        for name in part.model_extra or {}
        if name not in known
        for near in [difflib.get_close_matches(name, known, 1)]
    ]


def left_out(config: Config) -> list[str]:
    """Return the settings that change time or memory but are not simulated."""
    return [
        f"{path}{name}: {_UNMODELLED[name]}"
        for path, part, _ in _parts(config)
        for name, value in (part.model_extra or {}).items()
        if name in _UNMODELLED and _is_on(value)
    ]


def _is_on(value: Any) -> bool:
    """Return whether a value switches a feature on. Degrees of 1, and sections that are not enabled, do not."""
    if isinstance(value, dict):
        return bool(value) and value.get("enabled") is not False
    return value is True or (isinstance(value, int | float) and value > 1)


def _parts(config: Config) -> Iterator[tuple[str, Part, list[str]]]:
    zero, known = config.zero_optimization, known_keys()
    yield "", config, known["config"]
    yield "zero_optimization.", zero, known["zero_optimization"]
    for name, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload is not None:
            yield f"zero_optimization.{name}.", offload, known["offload"]


_VARIANTS: Final = re.compile(r"bool|.*[^A-Za-z0-9_].*")  # pydantic's names for the types of a union
_UNMODELLED: Final = {
    "zenflow": "selective updates are not simulated; all gradients are updated, as in ZeRO",
    "zero_quantized_weights": "all-gathers are simulated without quantization",
    "zero_quantized_gradients": "reduce-scatters are simulated without quantization",
    "zero_hpz_partition_size": "parameters are simulated as sharded over all devices",
    "mics_shard_size": "parameters are simulated as sharded over all devices",
    "tensor_parallel": "layers are simulated without tensor parallelism; give --parallel tensor=",
    "sequence_parallel_size": "sequences are simulated without sequence parallelism",
    "compression_training": "not simulated",
    "sparse_attention": "attention is simulated as dense",
    "torch_autocast": "weights and gradients are simulated in one type",
    "pipeline": "layers are simulated without pipeline stages",
}
