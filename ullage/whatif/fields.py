"""The fields that a study can vary: options of the request, sizes of the model, and all numbers of the machine."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import ValidationError

from hwprofiles.changes import CHANGED, CHANGES
from hwprofiles.paths import counts, number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve
from planner.choices.request import Request
from planner.costs.scalable import Scalable, all_scalables, scalables, scaled
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfig, ModelConfigError
from ullage.cli.arguments import lora, mtbf, switch
from ullage.cli.options import Options, known_options
from ullage.whatif.study import Value
from ullage.whatif.values import Number, expand, parse_number

Kind = Literal["option", "machine", "model"]

ALIASES: Final[Mapping[str, str]] = {
    "pcie": "host-link",
    "link.pcie": "host-link",
    "link.pcie.h2d_bytes_per_s": "host_link.down",
    "link.pcie.d2h_bytes_per_s": "host_link.up",
    "link.pcie.both_bytes_per_s": "host_link.both_bytes_per_s",
    "host.cores": "host.num_cores",
    "cores": "host.num_cores",
    "nvme.count": "nvme.num_drives",
    "drives": "nvme.num_drives",
    "gpu-memory": "device.memory_bytes",
    "nvlink": "intra_node.bytes_per_s",
    "network": "inter_node.bytes_per_s",
    **{option.dest: name for name, option in known_options().items() if option.dest != name},
}
"""Short or familiar names of fields."""

_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "lora": lora,
    "mtbf": mtbf,
}
"""Fields whose values are texts in a study, and the functions that read them."""

_OF_THIS_MACHINE: Final = "memory"
"""The only option that studies do not vary, because its value is different each time."""

_WORDS = {
    "host.num_cores": "cores of a node; scales rates of updates and other host passes, but not DRAM",
    "host.num_optimizer_cores": "cores of a node that run updates; scales the rate of updates",
    "nvme.num_drives": "striped drives of a node; scales rates and capacity; 0: no NVMe",
    "devices_per_node": "devices in a node, at most those of the profile",
}


@dataclasses.dataclass(frozen=True)
class Field:
    """One field that can be varied.

    Attributes:
        name: an option (``gpus``), a size of the model (``model.num_layers``), a path of the profile
            (``host.dram_bytes_per_s``), or a scalable that scales several paths (``host-link``).
        kind: whether it belongs to the request, the model or the machine.
        words: description of the field.
        unit: unit of its numbers; empty for counts and text.
        whole: values are whole numbers.
        switch: values are ``true`` and ``false``.
        present: value at the base point; ``None`` for options.
    """

    name: str
    kind: Kind
    words: str
    unit: str = ""
    whole: bool = False
    switch: bool = False
    present: Value | None = None

    def values(self, text: str) -> list[str | tuple[str, str]]:
        """Return the values of a list; see :func:`ullage.whatif.values.expand`."""
        if self.name == "lora":  # its values contain commas
            return [*re.split(r",(?=rank=|none)", text)]
        return expand(text, whole=self.whole)

    def parse(self, text: str) -> Number | Value:
        """Parse a value: a number or factor, a switch, or the value of an option.

        Raises:
            ValueError: the text is not a value of this field.
        """
        try:
            if self.kind == "option":
                option: Value = _option_value(self.name, text)
                return option
            if self.switch:
                return switch(text)
            parsed = parse_number(text, self.unit)
        except ValueError as error:
            raise ValueError(f"{self.name}={text}: {error}") from error
        if self.whole and not parsed.relative and parsed.value % 1:
            raise ValueError(f"{self.name}={text}: takes whole numbers; give one, or a factor such as 2x")
        return parsed


def fields_of(hardware: HardwareProfile, model: Model) -> dict[str, Field]:
    """Return all fields of a base machine and a base model, by name."""
    found = (*_option_fields(), *_model_fields(model), *_machine_fields(hardware))
    return {field.name: field for field in found}


def field_named(name: str, fields: Mapping[str, Field]) -> Field:
    """Return a field by its name, an alias, or its spelling as an option.

    Raises:
        ValueError: the field does not exist; the message names similar ones.
    """
    plain = name.removeprefix("--")
    for spelled in (ALIASES.get(plain, plain), plain.replace("-", "_")):
        if (field := fields.get(spelled)) is not None:
            return field
    inside = [other for other in fields if plain in other][:3]
    near = inside or difflib.get_close_matches(plain, [*fields, *ALIASES], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"no field is called {name!r}; {hint}`ullage whatif --fields` lists all")


def changed_machine(hardware: HardwareProfile, changes: Mapping[str, Number | Value]) -> HardwareProfile:
    """Return a machine with fields changed one after another.

    Raises:
        ValueError: the machine has no such field, or the value breaks a rule of the profile.
    """
    for name, change in changes.items():
        before = of_machine(hardware, name)
        after = _changed_value(before, change)
        try:
            if (scalable := _scalable(hardware, name)) is not None:
                hardware = scaled(hardware, scalable, float(after) / float(before))
            elif name in CHANGES:
                hardware = CHANGES[name](hardware, int(after))
            else:
                hardware = replace(hardware, {name: after}, CHANGED)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"{name} of {hardware.name} cannot be {after}: {reason}") from error
    return hardware


def changed_model(model: Model, changes: Mapping[str, Number | Value]) -> Model:
    """Return a model with sizes changed all at once.

    Raises:
        ValueError: the sizes do not match, or the model is a captured one.
    """
    if not changes:
        return model
    if isinstance(model, CapturedModel):
        raise ValueError(f"{next(iter(changes))}: {model.name} is a captured model, so its sizes cannot be varied")  # noqa: TRY004 - it is a model
    sizes = {name: _changed_value(of_model(model, name), change) for name, change in changes.items()}
    try:
        return ModelConfig.model_validate(model.model_dump() | {n.removeprefix("model."): v for n, v in sizes.items()})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ModelConfigError(f"{', '.join(f'{n}={v}' for n, v in sizes.items())}: {reason}") from error


def of_machine(hardware: HardwareProfile, name: str) -> float | int | bool:
    """Return the value of a machine's field; for a curve, its best rate.

    Raises:
        ValueError: the machine has no such field.
    """
    path = scalable.paths[0] if (scalable := _scalable(hardware, name)) else name
    if (item := quantities(hardware).get(path)) is not None:
        return number(item)
    if (count := counts(hardware).get(path)) is not None:
        return count
    raise ValueError(f"{hardware.name} has no {name}; choose a machine that has it, or leave the field out")


def of_model(model: Model, name: str) -> int | bool:
    """Return the value of a model's field."""
    value: int | bool = getattr(model, name.removeprefix("model."))
    return value


def options_of(values: Mapping[str, Any]) -> Options:
    """Return options of which only these are given."""
    known = known_options()
    return Options(**{known[name].dest: _READ.get(name, lambda value: value)(value) for name, value in values.items()})


def _changed_value(before: float | bool, change: Number | Value) -> Any:
    """Return a value after a change. Whole numbers are rounded to whole numbers."""
    if not isinstance(change, Number):
        return change
    after = before * change.value if change.relative else change.value
    return round(after) if isinstance(before, int) else after


def scalables_of(request: Request) -> tuple[Scalable, ...]:
    """Return the scalable properties of a request's machine that can affect the plan."""
    dtype, uses_storage = request.types.weights, request.storage == "nvme"
    return scalables(request.hardware, dtype, request.num_devices, uses_storage=uses_storage)


def _scalable(hardware: HardwareProfile, name: str) -> Scalable | None:
    return next((scalable for scalable in all_scalables(hardware) if scalable.key == name), None)


def _option_fields() -> Iterator[Field]:
    for name, option in known_options().items():
        if name != _OF_THIS_MACHINE:
            yield Field(name, "option", option.of["help"].replace("%%", "%"), whole=option.is_count)


def _model_fields(model: Model) -> Iterator[Field]:
    if isinstance(model, CapturedModel):
        return
    for name in ModelConfig.model_fields:
        value = getattr(model, name)
        if isinstance(value, int):
            switch = isinstance(value, bool)
            words = name.replace("_", " ").removeprefix("num ")
            yield Field(f"model.{name}", "model", words, whole=not switch, switch=switch, present=value)


def _machine_fields(hardware: HardwareProfile) -> Iterator[Field]:
    has = quantities(hardware)
    for scalable in all_scalables(hardware):
        item = has[scalable.paths[0]]
        words = f"{scalable.words}; scales {', '.join(scalable.paths)}"
        yield Field(scalable.key, "machine", words, item.unit, present=number(item))
    for path, item in has.items():
        words = "the whole curve; its value is the best rate" if isinstance(item, Curve) else ""
        yield Field(path, "machine", words, item.unit, present=number(item))
    for path, count in counts(hardware).items():
        switch = isinstance(count, bool)
        yield Field(path, "machine", _WORDS.get(path, ""), whole=not switch, switch=switch, present=count)


def _option_value(name: str, text: str) -> Any:
    option = known_options()[name]
    found = [option.read(part) for part in text.split()] if option.of.get("nargs") else option.read(text)
    return text if name in _READ else found
