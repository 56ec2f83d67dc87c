"""Find a model by name: among files, the packaged presets and what is in the hub's cache; never on the network."""

import difflib
import functools
import importlib.resources
import json
import os
from pathlib import Path
from typing import Any

from hwprofiles.files import read_json
from planner.models.config import ModelConfig, ModelConfigError, UnknownModelError
from planner.models.huggingface import from_hf_config, to_hf_config_dict
from planner.models.parameters import num_parameters


def resolve_model(text: str) -> ModelConfig:
    """Return the model that ``text`` names.

    Args:
        text: path of a ``config.json`` or of a folder with one, an alias (``opt-13b``) or a hub id
            (``facebook/opt-13b``), of a packaged model or of one whose ``config.json`` is in the hub's cache on this
            machine; names are compared without regard to case.

    Raises:
        UnknownModelError: there is none; names the nearest ones.
        NoFormulasError: it has an architecture that has to be captured.
        ModelConfigError: the file is not a configuration that can be used.
    """
    if (path := _file(text)) is not None:
        whole = Path(os.path.abspath(path))  # noqa: PTH100 - follows no links, which the hub's cache is made of
        return _from_file(path, (whole.parent.name if path.name == "config.json" else path.stem) or "model")
    if (alias := _names().get(text.lower())) is not None:
        return _preset(alias)
    if (path := _cached(text)) is not None:
        return _from_file(path, text.rpartition("/")[2])
    if text and Path(text).expanduser().is_dir():
        raise UnknownModelError(f"folder {text!r} has no config.json; give a folder that save_pretrained() wrote")
    nearest = difflib.get_close_matches(text.lower(), _names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}? A" if nearest else "a"
    raise UnknownModelError(
        f"no model or file is called {text!r}; {hint} path to a config.json works too, and so does the hub id of a "
        "model that is on this machine"
    )


def configuration(text: str) -> dict[str, Any]:
    """Return the content of the ``config.json`` that ``text`` names; see :func:`resolve_model`.

    Raises:
        ModelConfigError: there is none, or it is no configuration.
    """
    path, alias = _file(text), _names().get(text.lower())
    if path is None and alias is not None:
        captured = _captured().get(alias)
        return dict(captured["config"]) if captured else to_hf_config_dict(_preset(alias))
    path = path or _cached(text)
    return _read(path) if path else to_hf_config_dict(resolve_model(text))  # which says that there is none


def captured_preset(text: str) -> tuple[int, dict[str, Any]] | None:
    """Return the parameters and the configuration of a packaged model that has to be captured."""
    found = _captured().get(_names().get(text.lower(), ""))
    return (found["num_params"], found["config"]) if found else None


def list_models() -> dict[str, int]:
    """Return the packaged models' aliases with their numbers of parameters."""
    counted = {alias: num_parameters(_preset(alias)) for alias in models_with_formulas()}
    return counted | {alias: entry["num_params"] for alias, entry in _captured().items()}


def source_of(text: str) -> str:
    """Return where the sizes of a model are from: a file, the ``config.json`` of a hub's model, or a paper.

    Raises:
        UnknownModelError: there is no such model.
    """
    if (path := _file(text)) is not None:
        return str(path)
    if (alias := _names().get(text.lower())) is not None:
        entry = (_table() | _captured())[alias]
        return str(entry.get("source") or f"config.json of {entry['hub_ids'][0]}")
    return str(_cached(text) or resolve_model(text))  # which says that there is none


def models_with_formulas() -> tuple[str, ...]:
    """Return the aliases of packaged models that are planned from their sizes alone; the others are captured."""
    return tuple(_table())


def _file(text: str) -> Path | None:
    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    return path if path.exists() and not path.is_dir() else None


def _cached(text: str) -> Path | None:
    """Return the ``config.json`` of a hub's model in its cache on this machine (``HF_HOME``)."""
    if text.count("/") != 1:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow, and may be missing
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(text, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path) -> dict[str, Any]:
    data = read_json(path, ModelConfigError, "give a Hugging Face config.json")
    if not isinstance(data, dict):
        raise ModelConfigError(f"{path}: holds a {type(data).__name__}, not an object; give a Hugging Face config.json")
    return data


def _from_file(path: Path, name: str) -> ModelConfig:
    data = _read(path)
    try:
        return from_hf_config(data, name)
    except ModelConfigError as error:
        raise type(error)(f"{path}: {error}") from error


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return _entries("presets")


@functools.cache
def _captured() -> dict[str, dict[str, Any]]:
    return _entries("presets/captured")


def _entries(place: str) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    folder = importlib.resources.files("planner.models") / place
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".json"):
            table |= json.loads(file.read_text(encoding="utf-8"))
    return table


def packaged_names() -> dict[str, str]:
    """Return the alias of every packaged model by its aliases and hub ids, in lower case."""
    return dict(_names())


@functools.cache
def _names() -> dict[str, str]:
    entries = (_table() | _captured()).items()
    return {name.lower(): alias for alias, entry in entries for name in (alias, *entry["hub_ids"])}


@functools.cache
def _preset(alias: str) -> ModelConfig:
    return from_hf_config((_table() | _captured())[alias]["config"], alias)
