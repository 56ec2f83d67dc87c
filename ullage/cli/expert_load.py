"""The distribution of tokens over experts, as given on the command line."""

import math
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from hwprofiles.files import read_json
from planner.models.captured import Model
from planner.models.config import ModelConfig
from planner.models.formulas import experts


def _rows(value: object) -> object:
    """Return a single list of shares as a list of one row."""
    return [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value


_Shares = Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_rows)]


def expert_load(text: str, model: Model) -> tuple[tuple[float, ...], ...]:
    """Return each expert's share of the tokens, from ``uniform``, ``zipf:S`` or a file.

    Raises:
        ValueError: the text is none of these.
    """
    if text == "uniform":
        return ()
    if not isinstance(model, ModelConfig) or not model.is_expert_model:
        raise ValueError(f"--expert-load {text}: {model.name} has no experts; leave it out")
    if text.startswith("zipf:"):
        try:
            exponent = float(text.removeprefix("zipf:"))
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent <= 10:
            raise ValueError(f"--expert-load {text}: the exponent must be a number from 0 to 10, as in zipf:1.2")
        return (experts.zipf(model.num_experts, exponent),)
    data = read_json(Path(text), ValueError, "--expert-load takes uniform, zipf:S or a JSON file")
    try:
        return TypeAdapter(_Shares).validate_python(data)
    except ValidationError as error:
        raise ValueError(
            f"--expert-load {text} must hold a list of shares, or one for each layer; "
            f"{error.errors()[0]['msg'].lower()}"
        ) from error
