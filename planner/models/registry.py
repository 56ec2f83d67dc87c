"""Find a model by name: among files first, then among the packaged presets; never on the network."""

import difflib
import functools
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwprofiles.files import read_json
from planner.models.config import ModelConfig, ModelConfigError, UnknownModelError
from planner.models.huggingface import build, from_hf_config
from planner.models.parameters import num_parameters

# Number of learned positions where a published run does not record it.
DEFAULT_POSITIONS = 2048


def resolve_model(text: str) -> ModelConfig:
    """Return the model that ``text`` names.

    Args:
        text: path of a ``config.json`` or of a folder with one, an alias (``opt-13b``) or a hub id
            (``facebook/opt-13b``); names are compared without regard to case.

    Raises:
        UnknownModelError: no such file and no such preset; names the nearest ones.
        NoFormulasError: the file describes an architecture that has to be captured.
        ModelConfigError: the file is not a configuration that can be used.
    """
    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.exists() and not path.is_dir():
        return _from_file(path)
    names = _names()
    if (alias := names.get(text.lower())) is not None:
        return _preset(alias)
    nearest = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}? A" if nearest else "a"
    raise UnknownModelError(f"no model or file is called {text!r}; {hint} path to a config.json works too")


def list_models() -> dict[str, int]:
    """Return the packaged models' aliases with their numbers of parameters."""
    return {alias: num_parameters(_preset(alias)) for alias in _table()}


def model_from_case(case: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a published run.

    ``num_key_value_heads`` groups share heads of ``hidden_size / num_attention_heads``. GPT-2's learned positions
    are not recorded: ``DEFAULT_POSITIONS`` unless ``max_positions`` says otherwise.

    Args:
        case: ``name``, ``architecture`` (llama or gpt2), ``num_layers``, ``hidden_size``, ``ffn_hidden_size``,
            ``num_attention_heads``, ``num_key_value_heads``, ``vocab_size``, ``mlp``, ``norm``, ``tied_embeddings``,
            ``bias`` and, if known, ``num_params``.

    Raises:
        ModelConfigError: a size breaks a rule, or the parameters do not add up to ``num_params``.
    """
    name, family = str(case.get("name", "case")), case.get("architecture")
    if family not in {"llama", "gpt2"}:
        raise ModelConfigError(f"{name}: architecture is {family!r}; published cases are llama or gpt2")
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    keys = (*sizes, "mlp", "norm", "tied_embeddings")
    if missing := [key for key in (*keys, "bias") if key not in case]:
        raise ModelConfigError(f"{name}: {missing[0]} is missing; add that field to the case")
    bias = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), case["bias"])
    fields = {key: case[key] for key in keys} | bias | {"max_positions": case.get("max_positions", DEFAULT_POSITIONS)}
    config = build(fields, name, family)
    stated = case.get("num_params")
    if stated is not None and (found := num_parameters(config)) != stated:
        raise ModelConfigError(
            f"{name}: its sizes make {found} parameters, but num_params is {stated}; correct the sizes or leave it out"
        )
    return config


def _from_file(path: Path) -> ModelConfig:
    data = read_json(path, ModelConfigError, "give a Hugging Face config.json")
    if not isinstance(data, dict):
        raise ModelConfigError(f"{path}: holds a {type(data).__name__}, not an object; give a Hugging Face config.json")
    try:
        return from_hf_config(data, path.parent.name if path.name == "config.json" else path.stem)
    except ModelConfigError as error:
        raise type(error)(f"{path}: {error}") from error


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    folder = importlib.resources.files("planner.models") / "presets"
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".json"):
            table |= json.loads(file.read_text(encoding="utf-8"))
    return table


@functools.cache
def _names() -> dict[str, str]:
    return {name.lower(): alias for alias, entry in _table().items() for name in (alias, *entry["hub_ids"])}


@functools.cache
def _preset(alias: str) -> ModelConfig:
    return from_hf_config(_table()[alias]["config"], alias)
