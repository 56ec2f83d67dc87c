"""LoRA adapters (Hu et al., arXiv:2106.09685) and quantized bases: as requests state them, in plain data."""

from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationError, field_validator

from hwprofiles.quantity import Frozen
from planner.models.config import ModelConfigError

ALL_LINEAR: Final = "all-linear"
"""Stands for every projection of a model but its head."""

_FORM: Final = (
    "give rank=N[,targets=NAME+NAME|all-linear][,alpha=X][,dropout=X][,save=NAME+NAME], as in "
    "rank=16,targets=q_proj+v_proj"
)
_Names = tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], ...]


class Lora(Frozen):
    """Low-rank adapters beside frozen projections.

    Attributes:
        rank: width between the two matrices of an adapter.
        targets: names of the projections that get one, as ``peft`` takes them; or :data:`ALL_LINEAR` alone.
        alpha: the adapter's output is scaled by ``alpha / rank``; left out, by 1.
        dropout: share of an adapter's inputs that is set to zero in training.
        save: names of modules of which a copy is trained as a whole (``modules_to_save`` of ``peft``).
    """

    rank: Annotated[int, Field(gt=0, le=10**6)]
    targets: Annotated[_Names, Field(min_length=1)] = (ALL_LINEAR,)
    alpha: Annotated[float, Field(gt=0)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    save: _Names = ()

    @field_validator("targets")
    @classmethod
    def _all_alone(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"{ALL_LINEAR} contains all others; give it alone")
        return tuple(dict.fromkeys(targets))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what ``rank=16,targets=q_proj+v_proj,alpha=32,dropout=0.1`` means.

        Raises:
            ModelConfigError: it means nothing.
        """
        fields: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            name = name.strip()
            if not equals or name not in cls.model_fields or name in fields:
                raise ModelConfigError(f"{text!r} is no LoRA: {part!r} is not understood; {_FORM}")
            fields[name] = tuple(value.strip().split("+")) if name in {"targets", "save"} else value.strip()
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}"
            if first["type"] == "string_pattern_mismatch":
                reason = f"{first['loc'][0]}: {first['input']!r} is no name of a module"
            raise ModelConfigError(f"{text!r} is no LoRA: {reason}; {_FORM}") from error

    def __str__(self) -> str:
        """Return it as :meth:`read` reads it."""
        further = [f"{name}={value:.12g}" for name in ("alpha", "dropout") if (value := getattr(self, name))]
        further += [f"save={'+'.join(self.save)}"] if self.save else []
        return ",".join([f"rank={self.rank}", f"targets={'+'.join(self.targets)}", *further])
