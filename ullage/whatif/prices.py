"""What machines cost: the schema of a prices file."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from hwprofiles.complaints import complaint
from hwprofiles.files import read_json
from hwprofiles.quantity import Frozen, Provenance

HOURS_PER_MONTH: Final = 730.0
"""Of 365 days, as clouds bill them."""

Price = Annotated[float, Field(ge=0)]


class PricesError(ValueError):
    """A prices file that cannot be used, and what to do about it."""


class Extra(Frozen):
    """What more of something costs, and less of it saves, per node.

    Attributes:
        amount: so much of the field, in its base unit (1e9 for a GB).
        price: costs so much
        per: an hour, or a month of 730 of them.
    """

    amount: Annotated[float, Field(gt=0)]
    price: Price
    per: Literal["hour", "month"]

    @property
    def per_hour(self) -> float:
        """Price of one unit of the field in an hour."""
        return self.price / self.amount / (1 if self.per == "hour" else HOURS_PER_MONTH)


class MachinePrice(Frozen):
    """What one kind of machine costs.

    Attributes:
        per_device_hour: each device that is used.
        per_node_hour: each node that is used, on top of its devices.
        provenance: where the price comes from.
    """

    per_device_hour: Price = 0.0
    per_node_hour: Price = 0.0
    provenance: Provenance


class Prices(Frozen):
    """What machines cost.

    Attributes:
        currency: such as ``USD``.
        machines: by the name of the hardware profile.
        extras: by the name of a field that a study varies, such as ``host.memory_bytes``: what it costs to have more of
            it than the profile has. Fields that are not listed cost nothing.
    """

    schema_version: Literal[1] = 1
    currency: Annotated[str, Field(min_length=1)]
    description: str = ""
    machines: dict[str, MachinePrice]
    extras: dict[str, Extra] = Field(default_factory=dict)


def load_prices(path: Path | str) -> Prices:
    """Read and check a prices file.

    Raises:
        PricesError: it is missing, or not a file of prices.
    """
    path = Path(path)
    try:
        return Prices.model_validate(read_json(path, PricesError, "`--prices example` shows what one looks like"))
    except ValidationError as error:
        raise PricesError(f"{path}: {complaint(error, 'prices')}") from error
