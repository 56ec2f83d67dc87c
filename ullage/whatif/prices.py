"""The schema of a prices file: the cost of machines."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from hwprofiles.complaints import validated
from hwprofiles.files import read_json
from hwprofiles.quantity import Frozen, Provenance

HOURS_PER_MONTH: Final = 730.0
"""Hours of a month for cloud bills, a twelfth of 365 days."""

Price = Annotated[float, Field(ge=0)]


class Extra(Frozen):
    """The price per node of more of a field; less of it saves the same.

    Attributes:
        amount: amount of the field in its base unit (1e9 for a GB) that ``price`` is for.
        price: price of this amount.
        per: period of the price: an hour, or a month of 730 hours.
    """

    amount: Annotated[float, Field(gt=0)]
    price: Price
    per: Literal["hour", "month"]

    @property
    def per_hour(self) -> float:
        """Price per hour of one base unit of the field."""
        return self.price / self.amount / (1 if self.per == "hour" else HOURS_PER_MONTH)


class MachinePrice(Frozen):
    """The price of one kind of machine.

    Attributes:
        per_device_hour: price per hour of each device in use.
        per_node_hour: additional price per hour of each node in use.
        provenance: origin of the price.
    """

    per_device_hour: Price = 0.0
    per_node_hour: Price = 0.0
    provenance: Provenance


class Prices(Frozen):
    """Prices of machines.

    Attributes:
        currency: the currency, such as ``USD``.
        machines: prices by name of the hardware profile.
        extras: price of having more of a field than the profile, by name of a field that a study varies, such as
            ``host.memory_bytes``. Changes of fields that are not listed cost nothing.
    """

    schema_version: Literal[1] = 1
    currency: Annotated[str, Field(min_length=1)]
    description: str = ""
    machines: dict[str, MachinePrice]
    extras: dict[str, Extra] = Field(default_factory=dict)


def example_prices() -> Prices:
    """Return the packaged example: round figures of rented machines, to be replaced by your own."""
    return Prices.model_validate_json((files("ullage.whatif") / "prices_example.json").read_text(encoding="utf-8"))


def load_prices(path: Path | str) -> Prices:
    """Read and check a prices file.

    Raises:
        ValueError: the file is missing, or not a file of prices.
    """
    data = read_json(Path(path), ValueError, "a study with `--prices example` shows the format")
    return validated(Prices, data, path, "prices")
