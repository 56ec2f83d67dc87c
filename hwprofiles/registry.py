"""Profiles by name: the built-in ones, this machine's own, and files.

The canonical form of a profile is JSON with sorted keys, two spaces of indent, the shortest text that reads back as the
same float, and no empty optional fields. Files and digests use this form.
"""

import difflib
import json
import os
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

from hwprofiles.complaints import validated
from hwprofiles.files import locked, read_json, write_whole
from hwprofiles.profile import HardwareProfile

LOCAL = "local"
SCHEMA_VERSION = HardwareProfile.model_fields["schema_version"].default

_DATA = files("hwprofiles") / "data"


class ProfileError(ValueError):
    """A profile cannot be loaded; the message says which, why, and what to do."""


def local_profile_path() -> Path:
    """Return the path of this machine's own profile, which may not exist.

    The file is ``<hostname>.json`` in ``$ULLAGE_HOME``, else in ``$XDG_DATA_HOME/ullage``, else in
    ``~/.local/share/ullage``.
    """
    if home := os.environ.get("ULLAGE_HOME"):
        folder = Path(home)
    else:
        data_home = os.environ.get("XDG_DATA_HOME")
        folder = (Path(data_home) if data_home else Path.home() / ".local" / "share") / "ullage"
    return folder / f"{platform.node() or 'localhost'}.json"


def list_profiles() -> tuple[str, ...]:
    """Return the names that :func:`load_profile` knows: the built-in ones, sorted, and ``local`` if it exists."""
    names = sorted(entry.name.removesuffix(".json") for entry in _DATA.iterdir() if entry.name.endswith(".json"))
    return (*names, LOCAL) if local_profile_path().is_file() else tuple(names)


def load_profile(text: str) -> HardwareProfile:
    """Return the profile that ``text`` names.

    ``text`` is tried in this order: ``local``, the profile that calibration last wrote for this machine
    (:func:`local_profile_path`); a built-in name (:func:`list_profiles`); the path of a JSON file; a built-in name in
    another spelling (``RTX4090``). If a file has the name of a built-in profile, give its path as ``./h100``.

    Raises:
        ProfileError: no profile has that name, or the profile is not valid.
    """
    if not isinstance(text, str | Path):
        raise TypeError(f"the hardware is {type(text).__name__}; give the name of a profile, or the path of its file")
    text = str(text)
    if text == LOCAL:
        path = local_profile_path()
        if not path.is_file():
            raise ProfileError(f"there is no local profile ({path} does not exist); run `ullage calibrate` first")
        return _load_file(path)
    names = list_profiles()
    if text in names:
        return _built_in(text)
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        return _load_file(path)
    if same := [name for name in names if name != LOCAL and _letters(name) == _letters(text)]:
        return _built_in(*same)
    if path.suffix == ".json" or len(path.parts) > 1:
        raise ProfileError(f"{text}: there is no such file; give the path of a profile, or one of {', '.join(names)}")
    if "," in text:
        raise ProfileError(
            f"{text!r} names several machines; give one, and the other kinds of devices with --beside, as in --beside "
            "a100-80=4"
        )
    near = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? Built-in" if near else "built-in"
    raise ProfileError(
        f"unknown hardware {text!r}; {hint} profiles are {', '.join(names)}; the path of a JSON file works too"
    )


def profile_of(data: Any, where: str) -> HardwareProfile:
    """Return a profile from JSON data; error messages call the data ``where``.

    Raises:
        ProfileError: the data has another schema version, or breaks a rule of the schema.
    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None:
        raise ProfileError(f"{where} is not a profile: no schema_version; give a profile that `ullage calibrate` wrote")
    if version != SCHEMA_VERSION:
        raise ProfileError(
            f"{where} has schema_version {version!r}, but this version of ullage reads {SCHEMA_VERSION}; "
            "run `ullage calibrate` again, or install the version that wrote it"
        )
    return validated(HardwareProfile, data, where, "the profile", ProfileError)


def canonical_json(profile: HardwareProfile) -> str:
    """Return the canonical form of ``profile``. Equal profiles have equal text."""
    data = profile.model_dump(mode="json", exclude_none=True)
    return json.dumps(data, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Write ``profile`` to ``path`` in canonical form, making folders as needed.

    The write is atomic: a reader finds the complete old file or the complete new file, also after a crash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, canonical_json(profile))


def update_profile(path: Path, before: HardwareProfile, measured: HardwareProfile) -> HardwareProfile:
    """Write what ``measured`` has other than ``before`` into the profile that the file holds now, and return that.

    Another process may have written other parts since ``before`` was read.
    """
    with locked(path.resolve().parent):
        now = load_profile(str(path.absolute()))
        data = _merged(*(one.model_dump(mode="json", exclude_none=True) for one in (before, measured, now)))
        merged = profile_of(data, str(path))
        save_profile(merged, path)
    return merged


def _merged(before: Any, measured: Any, now: Any) -> Any:
    if measured == before:
        return now
    if not all(isinstance(one, dict) for one in (before, measured, now)):
        return measured
    parts = {key: _merged(*(one.get(key) for one in (before, measured, now))) for key in {**now, **measured}}
    return {key: part for key, part in parts.items() if part is not None}


def _built_in(name: str) -> HardwareProfile:
    data = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return profile_of(data, f"built-in profile {name}")


def _letters(name: str) -> str:
    """Return the letters and digits of a name in lower case. They differ between any two built-in profiles."""
    return "".join(filter(str.isalnum, name.lower()))


def _load_file(path: Path) -> HardwareProfile:
    return profile_of(read_json(path, ProfileError, "give a profile as `ullage calibrate` writes it"), str(path))
