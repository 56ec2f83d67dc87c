"""A study as a file: the request, and the result of every point.

The same schema serves both ends. A file with ``request`` alone is a study to be run (``ullage whatif STUDY``). A
finished one has ``points`` too, so that whatever was run can be run again. Numbers are in the base unit of their field
(bytes, seconds, amounts per second) unless an axis is *relative*: then they are factors of what the machine or model
has.
"""

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from hwprofiles.complaints import complaint
from hwprofiles.files import read_json
from hwprofiles.quantity import Frozen
from planner.schedule.tasks import Lane, Tier
from planner.terms import Level
from ullage.whatif.prices import Prices

SCHEMA_VERSION: Final = 2

Value = bool | int | float | str
Design = Literal["cartesian", "zip", "random"]
Status = Literal["fits", "lacks-memory", "refused", "failed"]
Question = Literal["fits", "cheapest", "upgrade", "scale", "longest", "largest"]


class StudyError(ValueError):
    """A study file that cannot be used, and what to do about it."""


class StudyRequest(Frozen):
    """What is to be found out.

    Attributes:
        set: fields that are the same at every point, by name, as they are written on the command line (``2x``,
            ``64GB``, ``h100``); ``model`` is one of them.
        sweep: fields that vary, each with its values, in the order in which tables have them.
        design: ``cartesian`` combines all values with all, ``zip`` takes the first of each, the second, and so on,
            ``random`` draws values independently.
        num_points: how many ``random`` draws.
        seed: of its draws.
        certify: prove for every point how far from the best its plan can be.
        tokens: what a whole run trains on; ``None``: costs are per token only.
        deadline_s: seconds within which the run has to end; ``None``: any time is fine.
        question: which preset made the axes, if one did.
    """

    set: dict[str, str]
    sweep: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    design: Design = "cartesian"
    num_points: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    certify: bool = False
    tokens: Annotated[float, Field(gt=0)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    question: Question | None = None


class Axis(Frozen):
    """One field that varies.

    Attributes:
        name: of the field.
        words: what it is.
        unit: of its values, such as ``bytes`` or ``bytes_per_s``; empty for counts and words.
        relative: values are factors of the present value.
        values: all that occur, in the order of the request.
    """

    name: str
    words: str
    unit: str = ""
    relative: bool = False
    values: tuple[Value, ...]


class Varied(Frozen):
    """One field at one point, in its unit.

    Attributes:
        before: the value without the study's change; ``None`` if there is none.
        after: the value at the point.
    """

    before: Value | None = None
    after: Value | None = None


class Peak(Frozen):
    """Memory of one tier: of one device, or of one node's host or drives."""

    peak_bytes: int
    capacity_bytes: int


class Checkpoints(Frozen):
    """When a plan makes checkpoints against the failures of its point, and what both take.

    Attributes:
        every: iterations from one to the next, by level, the fastest first.
        waste: expected fraction of time that is no progress: checkpoints, and what failures lose.
        overhead: what checkpoints add to training, as a fraction of it.
        most_lost_s: by one failure.
    """

    every: dict[Level, int]
    waste: Annotated[float, Field(ge=0, lt=1)]
    overhead: float
    most_lost_s: float


class Figures(Frozen):
    """The prediction for a point's plan, or its missing memory.

    Attributes:
        iteration_s, forward_s, backward_s, update_s, loop_s: see :class:`planner.simulate.prediction.Prediction`.
        tokens_per_iteration, tokens_per_s: over all devices.
        model_flop_per_s: per device, without recomputation.
        num_devices, num_nodes: in use.
        bound_by: the lane with the largest share of the critical path.
        critical_shares: share of every lane in the critical path, largest first; they add up to 1.
        busy_shares: part of the iteration that each lane is occupied.
        memory: peaks by tier.
        choice: degrees and batch in words.
        placement: where things are, in words.
        engines: predicted seconds per iteration of engine policies; ``None`` where one does not fit.
        bound_s: proven lower bound on the iteration time; ``None`` unless requested.
        gap: how much slower the plan is than that, as a fraction.
        warnings: what readers should know about the prediction.
        num_simulations: schedules that the search simulated.
        checkpoints: chosen for the failures of the point; ``None``: it has none.
    """

    iteration_s: float
    forward_s: float
    backward_s: float
    update_s: float
    loop_s: float
    tokens_per_iteration: int
    tokens_per_s: float
    model_flop_per_s: float
    num_devices: int
    num_nodes: int
    bound_by: Lane
    critical_shares: dict[Lane, float]
    busy_shares: dict[Lane, float]
    memory: dict[Tier, Peak]
    choice: str
    placement: str
    engines: dict[str, float | None]
    bound_s: float | None = None
    gap: float | None = None
    warnings: tuple[str, ...] = ()
    num_simulations: int
    checkpoints: Checkpoints | None = None

    @property
    def goodput_tokens_per_s(self) -> float:
        """Tokens per second of all time, of which checkpoints and failures take some."""
        return self.tokens_per_s * (1 - self.checkpoints.waste if self.checkpoints else 1)


class Result(Frozen):
    """What planning a point found; a function of the point alone.

    Attributes:
        status: ``fits``; ``lacks-memory``: no plan was found that fits; ``refused``: it cannot be done so (degrees that
            do not divide, a machine without a network); ``failed``: the planner broke, which is a bug of ours.
        reason: in one line, why there is no plan.
        missing_bytes: by tier, what the best that was tried lacks.
        proven: that no schedule fits is proven.
        figures: of the plan.
    """

    status: Status
    reason: str | None = None
    missing_bytes: dict[Tier, int] = Field(default_factory=dict)
    proven: bool = False
    figures: Figures | None = None


class Cost(Frozen):
    """What a point costs, in the currency of the prices.

    Attributes:
        per_hour: all its nodes.
        per_million_tokens: at the predicted speed, with checkpoints and failures if the point has any.
        run_s: seconds that the whole run takes.
        run: what the whole run costs.
        in_time: whether the run ends within the deadline; ``None``: there is none.
    """

    per_hour: float
    per_million_tokens: float
    run_s: float | None = None
    run: float | None = None
    in_time: bool | None = None


class Point(Frozen):
    """One point of a study.

    Attributes:
        settings: the value of every axis, as the axis has it.
        varied: every field that the study sets or sweeps and that changes a number of the machine or the model.
        hardware, model: names of machine and model.
        key: digest of everything that determines the result.
        result: of the point.
        cost: if there are prices for it and it fits.
        on_front: no other point is both faster and cheaper per token.
    """

    settings: dict[str, Value]
    varied: dict[str, Varied] = Field(default_factory=dict)
    hardware: str
    model: str
    key: str
    result: Result
    cost: Cost | None = None
    on_front: bool = False

    @property
    def figures(self) -> Figures | None:
        """Figures of a point that fits."""
        return self.result.figures if self.result.status == "fits" else None


class Side(Frozen):
    """What planning anew found with more or less of a resource.

    Attributes:
        factor: times what there is.
        value: that, in its unit.
        iteration_s: of the plan found there; ``None``: none fits.
        bound_by: the lane that bounds it.
    """

    factor: float
    value: float
    iteration_s: float | None = None
    bound_by: Lane | None = None


class Crossing(Side):
    """Where another lane takes over as what bounds the plan; ``factor`` is just beyond it."""


AS_GOOD_AS_NONE: Final = 0.05
"""Elasticities below are what searches leave open; see [Note: Elasticity] in :mod:`ullage.whatif.sensitivity`."""


class Sensitivity(Frozen):
    """What one resource is worth to the study's base point, planned anew on either side.

    Attributes:
        name: of its field.
        words: what it is.
        unit: of its value.
        value: what there is.
        less, more: the sides.
        elasticity_less, elasticity_more: relative change of the iteration time over that of the resource towards each
            side (d ln T / d ln r): -1 is inversely proportional, 0 does not matter. They differ where the best plan
            changes. ``None``: nothing fits there.
        step_words: a step that people buy, such as ``1 GB/s`` or ``1 core``.
        seconds_per_step: change of the iteration time for one step more, from ``elasticity_more``.
        below, above: the nearest crossings; ``None``: there is none within the range that was searched.
    """

    name: str
    words: str
    unit: str
    value: float
    less: Side
    more: Side
    elasticity_less: float | None = None
    elasticity_more: float | None = None
    step_words: str
    seconds_per_step: float | None = None
    below: Crossing | None = None
    above: Crossing | None = None

    @property
    def saved_s(self) -> float | None:
        """Seconds that one step more saves; 0 if that is as good as none, ``None`` if nothing fits there."""
        if self.seconds_per_step is None or self.elasticity_more is None:
            return None
        return -self.seconds_per_step if abs(self.elasticity_more) >= AS_GOOD_AS_NONE else 0.0


class Sensitivities(Frozen):
    """What every resource is worth around one point.

    Attributes:
        base: the point's result.
        step: relative change to either side.
        range: crossings were searched from one over this factor to this factor.
        rows: the largest effect first.
    """

    base: Result
    step: float
    range: float
    rows: tuple[Sensitivity, ...]


class Minimum(Frozen):
    """The least of one machine with which a plan was found; each of the others as the profile has it.

    Attributes:
        hardware: name of its profile.
        num_devices: as few as that.
        device_memory_bytes: of each device.
        host_memory_bytes: of each node.
        num_drives: of each node, where the study may use them; ``None``: it may not, or needs none.
    """

    hardware: str
    num_devices: int
    device_memory_bytes: float
    host_memory_bytes: float
    num_drives: int | None = None


class Answer(Frozen):
    """What a question comes to.

    Attributes:
        question: which one.
        words: the answer, as people would say it; one line each.
        points: positions of the points it rests on, the best first.
        least: what each machine needs at least (question ``fits``).
        efficiency: of every point, its speed per device over that of the smallest one that fits (question ``scale``).
    """

    question: Question
    words: tuple[str, ...]
    points: tuple[int, ...] = ()
    least: tuple[Minimum, ...] = ()
    efficiency: tuple[float | None, ...] = ()


class Study(Frozen):
    """A study; see the module.

    Attributes:
        program_version: of the program that planned the points.
        request: the request of the study.
        axes: what varies.
        prices: what points are charged with.
        points: in the order of the design; empty before it is run.
        complete: all points of the design are there.
        sensitivities: around the base point.
        answer: to the question.
        notes: what readers should know about the figures: assumed prices, fields that cost nothing, extrapolation.
    """

    schema_version: Literal[2] = 2
    program_version: str = ""
    request: StudyRequest
    axes: tuple[Axis, ...] = ()
    prices: Prices | None = None
    points: tuple[Point, ...] = ()
    complete: bool = False
    sensitivities: Sensitivities | None = None
    answer: Answer | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the text of the file: equal studies, equal bytes."""
        data = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def load_study(path: Path | str) -> Study:
    """Read and check a study file.

    Raises:
        StudyError: it is missing, not a study, or of another schema version.
    """
    path = Path(path)
    data = read_json(path, StudyError, "make a study with `ullage whatif`")
    if not isinstance(data, dict) or "request" not in data:
        raise StudyError(f'{path} is not a study: it has no "request"; `ullage whatif --help` shows one')
    if (version := data.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise StudyError(f"{path} has schema_version {version}, but this program reads {SCHEMA_VERSION}; run it again")
    try:
        return Study.model_validate(data)
    except ValidationError as error:
        raise StudyError(f"{path}: {complaint(error, 'study')}") from error
