"""Plan one point of a study. The result depends only on the settings of the point."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
from typing import Any, Final, Literal

from hwprofiles import __version__
from planner.checkpoints.choosing import choose_checkpoints
from planner.checkpoints.trial import Trial
from planner.choices.request import Request
from planner.plan.checkpoints import CheckpointRequest
from planner.plan.competition import Found
from planner.plan.document import Plan, describe
from planner.plan.planning import InfeasibleError, find
from ullage.rivals import engines_beside
from ullage.whatif.study import SCHEMA_VERSION, Checkpoints, Figures, Result, Value, Varied

# Libraries whose results affect plans.
_LIBRARIES: Final = ("highspy", "numba", "numpy", "scipy")
_PACKAGES: Final = ("hwprofiles", "planner")


Effort = Literal["plan", "certify", "fit"]
"""Effort for a point: a plan as by `ullage plan`; the same with a proof of its gap; or only the first plan that
fits, without other engines."""


@dataclasses.dataclass(frozen=True)
class PointRequest:
    """A point to plan.

    Attributes:
        settings: the value of every axis.
        varied: fields of machine and model that the study changes.
        hardware, model: names of machine and model.
        request: the request; ``None`` if it is invalid (see ``refused``).
        key: digest of everything that determines the result.
        refused: the reason if the request is invalid.
        checkpoints: request for checkpoints, with failures and limits, if there is one.
    """

    settings: dict[str, Value]
    varied: dict[str, Varied]
    hardware: str
    model: str
    request: Request | None
    key: str
    refused: Result | None = None
    checkpoints: CheckpointRequest | None = None

    def plan(self, effort: Effort) -> Result:
        """Plan the point; see :func:`plan_point`."""
        assert self.request is not None, "what is refused is not planned"
        return plan_point(self.request, effort, self.checkpoints)


def digest_of(request: Request, effort: Effort, checkpoints: CheckpointRequest | None = None) -> str:
    """Return a SHA-256 of everything that determines a point's result: the request, the program and its libraries."""
    parts = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    plain = {
        name: value.model_dump(mode="json") if hasattr(value, "model_dump") else value for name, value in parts.items()
    }
    failures = checkpoints.model_dump(mode="json") if checkpoints else None
    program = {"schema": SCHEMA_VERSION, "program": program_digest()}
    return _sha256({"request": plain, "effort": effort, "failures": failures, **program})


@functools.cache
def program_digest() -> str:
    """Return a SHA-256 of the program's version, of the code for planning, and of the versions of its libraries."""
    code = hashlib.sha256()
    for package in _PACKAGES:
        with importlib.resources.as_file(importlib.resources.files(package)) as home:
            for path in sorted(home.rglob("*.py")):
                code.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return _sha256({"version": __version__, "code": code.hexdigest(), "libraries": libraries})


def plan_point(request: Request, effort: Effort, checkpoints: CheckpointRequest | None = None) -> Result:
    """Plan a point, and return its figures, or the reason if there are none.

    An error is a result too, so that the study continues.

    Args:
        request: request of the point.
        effort: effort for the point.
        checkpoints: request for checkpoints; ignored if ``effort`` is ``fit``.
    """
    try:
        if checkpoints is None or effort == "fit":
            found, chosen = find(request, max_simulations=1 if effort == "fit" else None), None
        else:
            found, chosen = _with_checkpoints(request, checkpoints)
        figures = _figures(request, found, certify=effort == "certify", engines=effort != "fit")
        return Result(status="fits", figures=figures.model_copy(update={"checkpoints": chosen}))
    except InfeasibleError as error:
        return Result(
            status="lacks-memory", reason=_line(error), missing_bytes=error.missing_bytes, proven=error.proven
        )
    except ValueError as error:
        return Result(status="refused", reason=_line(error))
    except MemoryError:  # not a result of the point: another time there may be enough memory
        raise
    except Exception as error:  # noqa: BLE001 - a bug of the planner fails only this point
        return Result(status="failed", reason=f"{type(error).__name__}: {_line(error)}")


def _figures(request: Request, found: Found, *, certify: bool, engines: bool) -> Figures:
    seen, decided = found.prediction, found.decisions
    certificate = found.certificate() if certify else None
    beside = engines_beside(found) if engines else {}
    return Figures(
        **dict(seen),
        tokens_per_iteration=decided.num_sequences * request.seq_len,
        num_devices=decided.num_devices,
        num_nodes=-(-decided.num_devices // request.hardware.devices_per_node),
        choice=decided.words,
        placement=describe(decided, found.own.setup.units),
        engines={name: None if row.missing_bytes else row.iteration_s for name, (_, row) in beside.items()},
        bound_s=certificate.bound_s if certificate else None,
        gap=certificate.gap(seen.iteration_s) if certificate else None,
        num_simulations=found.num_simulations,
    )


_tried: dict[str, tuple[Found, Plan, Trial]] = {}
"""Cache of the last plan with checkpoints: studies vary the failure rates of the same request in a row."""


def _with_checkpoints(request: Request, checkpoints: CheckpointRequest) -> tuple[Found, Checkpoints]:
    """Return the best plan and its checkpoints. Simulations are reused for the next failure rates.

    Raises:
        ValueError: no checkpoints survive the failures within the limits, or failures take all the time.
    """
    if (key := digest_of(request, "plan")) not in _tried:
        found = find(request)
        # A plan without the proof of its gap, which takes as long as the search.
        unproven: dict[str, Any] = {
            "model": request.model,
            "seq_len": request.seq_len,
            "expert_load": request.expert_load,
            "hardware": request.hardware,
            "decisions": found.decisions,
            "prediction": found.prediction,
        }
        plan = Plan.model_construct(**unproven)
        _tried.clear()
        _tried[key] = found, plan, Trial(plan)
    found, plan, trial = _tried[key]
    chosen = choose_checkpoints(plan, checkpoints, trial)
    if chosen.waste >= 1:
        raise ValueError("failures take all the time, whatever checkpoints are made; give a longer mtbf")
    return found, Checkpoints(
        every={level.level: level.every for level in chosen.levels},
        waste=chosen.waste,
        overhead=chosen.overhead,
        most_lost_s=chosen.most_lost_s,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()
