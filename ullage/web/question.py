"""A question: what a visitor asks, checked, and what asks the same on the command line and in Python.

A model and a machine are names of our own lists, or the content of a file. Nothing is a path: what is written to disk
for the planner is our own text, in a folder that we made.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import ullage

MOST_BYTES: Final = 256 * 1024
"""Of a question with its files. A profile with everything in it has 40 kB."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_HOW: Final[dict[str, dict[str, str]]] = {"full": {}, "lora": {}, "qlora": {"quantize": "nf4"}}
_TYPES: Final = {"bf16": {"precision": "bf16"}, "fp32": {"precision": "fp32"}, "fp8": {"products": "fp8"}}
# No plan fits in a kilobyte of host memory but one that uses none.
_STORAGE: Final[dict[str, dict[str, Any]]] = {"never": {}, "gpu": {"host_memory": 1000}}

# The axes of a sweep: the name in studies, and the values of the slider.
AXES: Final = {
    "gpus": "1,2,4,8,16,32,64",
    "seq_len": "512,1024,2048,4096,8192,16384,32768,65536",
    "micro_batch": "1,2,4,8,16,32,64",
    "pcie": "0.25x,0.5x,1x,2x,4x,8x",
    "host.memory_bytes": "0.25x,0.5x,1x,2x,4x",
    "device.memory_bytes": "0.5x,0.75x,1x,1.5x,2x,3x,4x",
}


# Parts of names of fields that name code, kernels, models or files, or say how weights are packed.
_NO_FIELDS: Final = ("auto_map", "backbone", "trust", "path", "kernels", "implementation", "quantization", "file")
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.+-]{0,99}")
_MOST_LAYERS, _MOST_SIZE, _MOST_DEPTH = 1024, 10**8, 8
_LEFT_OUT: Final = object()


class Question(BaseModel):
    """What is trained, on what, and how.

    Attributes:
        model: a packaged model's name or hub id; the name to show, if ``config`` is given; on a page that only this
            machine sees, also the hub id of a model that is on its disk.
        config: content of a ``config.json`` in place of a name.
        machine: a packaged profile's name; the name to show, if ``profile`` is given.
        profile: content of a calibrated profile in place of a name.
        gpus: devices.
        seq_len: tokens per sequence; ``None``: the default.
        step_tokens: tokens per optimizer step over all devices; ``None``: one micro-batch on each device.
        how: all weights, adapters (LoRA), or adapters beside frozen weights in 4 bits (QLoRA).
        rank: rank of adapters.
        optimizer: name of an optimizer.
        precision: type of weights and gradients; ``fp8``: bf16 with products in fp8.
        storage: what may be used beside the GPU: ``gpu`` nothing, else see ``ullage plan --storage``.
        tokens: tokens of the whole run, for the cheapest machine.
        days: days in which it must end, for the cheapest machine.
        axis: what a sweep varies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=100)] = "llama-3-8b"
    config: dict[str, Any] | None = None
    machine: Annotated[str, Field(min_length=1, max_length=100)] = "rtx-4090"
    profile: dict[str, Any] | None = None
    gpus: Annotated[int, Field(ge=1, le=1024)] = 1
    seq_len: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    step_tokens: Annotated[int, Field(ge=1, le=2**30)] | None = None
    how: Literal["full", "lora", "qlora"] = "full"
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    optimizer: Annotated[str, Field(max_length=40)] = "adamw"
    precision: Literal["bf16", "fp32", "fp8"] | None = None
    storage: Literal["gpu", "never", "activations", "nvme"] = "never"
    tokens: Annotated[float, Field(gt=0, le=1e18)] | None = None
    days: Annotated[float, Field(gt=0, le=1e6)] | None = None
    axis: Literal[*AXES] | None = None  # type: ignore[valid-type]

    def key(self, kind: str) -> str:
        """Return the canonical form of a question of a kind; equal questions have equal keys."""
        left_out = {"cheapest": {"axis", "machine", "profile", "gpus"}, "sweep": {"tokens", "days"}}.get(
            kind, {"tokens", "days", "axis"}
        )
        return json.dumps([kind, self.model_dump(exclude=left_out)], sort_keys=True)

    def options(self, folder: Path) -> dict[str, Any]:
        """Return the keywords of ``ullage.plan``. Files that were given are written into a folder, and named from it.

        Raises:
            ValueError: a file cannot be used; or tokens per step are not whole sequences.
        """
        return {"model": self._model(folder), "hardware": self._machine(folder), **self._more()}

    def _more(self) -> dict[str, Any]:
        found: dict[str, Any] = {"gpus": self.gpus, "seq_len": self.seq_len, "global_batch": self._sequences()}
        found |= {"lora": None if self.how == "full" else f"rank={self.rank}", **_HOW[self.how]}
        found |= {} if self.optimizer == "adamw" else {"optimizer": self.optimizer}
        found |= _STORAGE.get(self.storage, {"storage": self.storage})
        found |= _TYPES[self.precision] if self.precision else {}
        return {name: value for name, value in found.items() if value is not None}

    def _sequences(self) -> int | None:
        if self.step_tokens is None:
            return None
        if self.seq_len is None:
            raise ValueError("tokens per step need tokens per sequence too; give both")
        if self.step_tokens % self.seq_len:
            raise ValueError(
                f"{self.step_tokens:,} tokens per step are not whole sequences of {self.seq_len:,}; give a multiple"
            )
        return self.step_tokens // self.seq_len

    def _model(self, folder: Path) -> str:
        if self.config is None:
            return self.model
        try:
            data = ullage.to_hf_config_dict(ullage.from_hf_config(self.config, _plain(self.model)))
        except ullage.NoFormulasError:
            data = tamed(self.config)
        return _written(folder, f"{_plain(self.model)}/config.json", data)

    def _machine(self, folder: Path) -> str:
        if self.profile is None:
            return self.machine
        name = _plain(self.machine).lower()
        profile = ullage.profile_of(self.profile, "the profile").model_copy(update={"name": name})
        return _written(folder, f"profiles/{name}.json", profile.model_dump(mode="json", exclude_none=True))

    def command(self) -> str:
        """Return the command that asks the same; files have the names that they were given with."""
        more = self._more()
        flags = {"global_batch": "global-batch", "seq_len": "seq-len"}
        if (host_bytes := more.pop("host_memory", None)) is not None:
            more["memory"] = f"host={host_bytes // 1000}kB"
        types = {"precision": more.pop("precision", "bf16"), "products": more.pop("products", None)}
        words = ["ullage", "plan", "--model", self._named_model(), "--hardware", self._named_machine()]
        for name, value in more.items():
            words += [f"--{flags.get(name, name)}", str(value)]
        if self.precision:
            words += ["--precision", types["precision"] + (",products=fp8" if types["products"] else "")]
        return shlex.join(words)

    def python(self) -> str:
        """Return the Python that asks the same."""
        more = {"hardware": self._named_machine(), **self._more()}
        keywords = ", ".join(f"{name}={value!r}" for name, value in more.items())
        return f"import ullage\n\nplan = ullage.plan({self._named_model()!r}, {keywords})"

    def _named_model(self) -> str:
        return self.model if self.config is None else f"{_plain(self.model)}/config.json"

    def _named_machine(self) -> str:
        return self.machine if self.profile is None else f"{_plain(self.machine).lower()}.json"


def machines(*, public: bool) -> list[str]:
    """Return the names of the profiles that the page offers; where others reach it, without this machine's own."""
    return [name for name in ullage.list_profiles() if not (public and name == "local")]


def question_of(text: bytes, *, public: bool) -> Question:
    """Return a question that was sent.

    Args:
        text: JSON.
        public: whether models that are only on this machine's disk stay unknown.

    Raises:
        ValueError: it is none, in one line.
    """
    try:
        data = json.loads(text, parse_constant=_refuse)
        found = Question.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the question"
        raise ValueError(f"{where}: {first['msg'].lower()}"[:300]) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the question is not JSON ({error}); send what the page sends"[:300]) from None
    return _named(found, public=public)


def _named(asked: Question, *, public: bool) -> Question:
    """Return the question with the names of our own lists; refuse all others, before anything looks for a file."""
    found = {}
    if asked.config is None:
        found["model"] = ullage.packaged_names().get(asked.model.lower(), "")
        if not found["model"]:
            if public or not _NAME.fullmatch(asked.model):
                raise ValueError(f"no model is called {asked.model!r}; choose one of the list, or drop a config.json")
            found["model"] = asked.model
    if asked.profile is None and asked.machine not in machines(public=public):
        raise ValueError(f"no machine is called {asked.machine!r}; choose one of the list, or drop a profile")
    return asked.model_copy(update=found)


def tamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return what `transformers` may know of a visitor's ``config.json``: sizes, switches and plain words.

    Texts that could name a file, code or a model elsewhere are left out, and so are fields that would.

    Raises:
        ValueError: a size is beyond all models.
    """
    found: dict[str, Any] = _tamed("", config, 0)
    return found


def _tamed(name: str, given: Any, depth: int) -> Any:
    if depth > _MOST_DEPTH or name.startswith("_") or any(word in name for word in _NO_FIELDS):
        return _LEFT_OUT
    if isinstance(given, dict):
        found = {key: _tamed(key, each, depth + 1) for key, each in given.items()}
        return {key: each for key, each in found.items() if each is not _LEFT_OUT}
    if isinstance(given, list):
        return [value for each in given if (value := _tamed(name, each, depth + 1)) is not _LEFT_OUT]
    if isinstance(given, str):
        return given if _WORD.fullmatch(given) else _LEFT_OUT
    most = _MOST_LAYERS if "layer" in name or "block" in name or "depth" in name else _MOST_SIZE
    if isinstance(given, int) and abs(given) > most:
        raise ValueError(f"{name} is {given:,}, but at most {most:,} is planned here; correct the config.json")
    return given


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _plain(name: str) -> str:
    """Return a name that is safe as that of a file."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name.removesuffix(".json")).strip("-")[:60] or "mine"


def _written(folder: Path, name: str, data: Any) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return name
