"""Fit a profile to whole runs: least squares on the few quantities that nobody published or measured.

[Note: Fitting] A residual is ``log(predicted / measured)`` of one measured time or rate of one run, so that a phase of
a millisecond weighs as much as one of a minute. The unknowns are logarithms of quantities of the profile, so that they
stay positive. Each is bounded to a range around its present value. An unknown that the runs do not determine is
refused. Memory is not fitted: no quantity of a profile changes it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from ullage.rivals.cases import Case, Metric, Outcome

MAX_PARAMETERS = 8
RESIDUALS_PER_PARAMETER = 2
DEFAULT_RANGE = 8.0
# Relative change of an unknown for derivatives, large enough to step over kinks of simulated schedules.
_STEP = 0.02
# An unknown with a larger standard error of its logarithm is known only to a factor of two.
_UNDETERMINED = math.log(2)


class FitError(ValueError):
    """The runs cannot determine the unknowns; the message names them, the rule and a remedy."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """One fitted quantity.

    Attributes:
        path: of the quantity in the profile.
        start, value: before and after, in its own unit; for a curve, its best rate per second.
        low, high: its bounds.
        relative_error: relative standard error of the value.
    """

    path: str
    start: float
    value: float
    low: float
    high: float
    relative_error: float

    @property
    def at_bound(self) -> bool:
        """Whether the value is at a bound, so that the runs would fit better with an implausible value."""
        return min(self.value / self.low, self.high / self.value) < 1.01


@dataclasses.dataclass(frozen=True)
class Fit:
    """A profile fitted to runs.

    Attributes:
        profile: with the fitted values.
        fitted: the fitted quantities.
        residuals: ``log(predicted / measured)`` after the fit, by case and metric.
        num_simulations: number of simulated runs.
    """

    profile: HardwareProfile
    fitted: tuple[Fitted, ...]
    residuals: Mapping[tuple[str, Metric], float]
    num_simulations: int

    @property
    def rms(self) -> float:
        """Root mean square of the residuals, about the relative error of a typical time."""
        return math.sqrt(sum(r * r for r in self.residuals.values()) / len(self.residuals))


def fitted_paths(profile: HardwareProfile) -> tuple[str, ...]:
    """Return the quantities that are fitted in a profile; they are the default unknowns."""
    return tuple(path for path, item in quantities(profile).items() if item.provenance.origin == "fitted")


def fit(
    profile: HardwareProfile,
    cases: Sequence[Case],
    paths: Sequence[str],
    *,
    source: str,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Fit:
    """Fit quantities of a profile to runs; see [Note: Fitting].

    Args:
        profile: the start.
        cases: runs on this machine.
        paths: the unknowns.
        source: source of the runs, for the provenance.
        ranges: bounds of an unknown in its own unit; by default its value divided by and times ``DEFAULT_RANGE``.
        progress: called with the number of simulated runs.

    Raises:
        FitError: too many unknowns, an unknown that is 0 or unknown, or one that the runs do not determine.
        CaseError: a run cannot be expressed.
    """
    start = _start(profile, paths)
    bounds = _bounds(start, ranges or {})
    for case in cases:
        case.check()
    misfit = _Misfit(profile, cases, paths, source, progress)
    num_measured = len(misfit.measured)
    if len(paths) > MAX_PARAMETERS or RESIDUALS_PER_PARAMETER * len(paths) > num_measured:
        raise FitError(
            f"{len(paths)} quantities cannot be fitted to {num_measured} measured values of {len(cases)} runs: at "
            f"most {MAX_PARAMETERS}, and {RESIDUALS_PER_PARAMETER} values for each; fit fewer, or to more runs"
        )
    lows, highs = (np.log([bounds[path][side] for path in paths]) for side in (0, 1))
    solution = least_squares(
        misfit,
        np.clip(np.log([start[path] for path in paths]), lows + 1e-9, highs - 1e-9),
        bounds=(lows, highs),
        jac=functools.partial(_jacobian, misfit, lows=lows, highs=highs),
        x_scale=1.0,
        ftol=1e-4,
        xtol=1e-3,
        max_nfev=25,
    )
    errors = _standard_errors(np.asarray(solution.jac), solution.fun, paths)
    keys = ((case.id, metric) for case, metric, _ in misfit.measured)
    return Fit(
        profile=misfit.profile_at(solution.x),
        fitted=tuple(
            Fitted(path, start[path], math.exp(x), *bounds[path], error)
            for path, x, error in zip(paths, solution.x, errors, strict=True)
        ),
        residuals=dict(zip(keys, solution.fun.tolist(), strict=True)),
        num_simulations=misfit.num_simulations,
    )


class _Misfit:
    """The residuals as a function of the unknowns; see [Note: Fitting].

    Attributes:
        measured: case, metric and measured value of each residual.
        num_simulations: runs simulated so far.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        cases: Sequence[Case],
        paths: Sequence[str],
        source: str,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.measured = [(case, metric, value) for case in cases for metric, value in _timed(case)]
        self.num_simulations = 0
        self._profile, self._cases, self._paths, self._progress = profile, cases, paths, progress
        self._provenance = Provenance(origin="fitted", source=source, runs=tuple(case.id for case in cases))

    def profile_at(self, logs: npt.NDArray[np.float64]) -> HardwareProfile:
        """Return the profile with the unknowns, given as logarithms."""
        return replace(self._profile, dict(zip(self._paths, np.exp(logs).tolist(), strict=True)), self._provenance)

    def __call__(self, logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        outcomes = predictions(self.profile_at(logs), self._cases)
        self.num_simulations += len(self._cases)
        if self._progress:
            self._progress(self.num_simulations)
        return np.array([math.log(outcomes[case.id].values[metric] / value) for case, metric, value in self.measured])


def _bounds(start: Mapping[str, float], ranges: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    if strange := [path for path in ranges if path not in start]:
        raise FitError(f"bounds are given for {strange[0]}, which is not fitted; fit it too, or leave them out")
    bounds = {path: ranges.get(path, (value / DEFAULT_RANGE, value * DEFAULT_RANGE)) for path, value in start.items()}
    for path, (low, high) in bounds.items():
        if not 0 < low < high < math.inf or not low <= start[path] <= high:
            raise FitError(
                f"{path}: {start[path]:g} must lie between the bounds {low:g} and {high:g}, which must be positive and "
                "finite; correct them"
            )
    return bounds


def _start(profile: HardwareProfile, paths: Sequence[str]) -> dict[str, float]:
    known = quantities(profile)
    if not paths:
        raise FitError(f"{profile.name} has no fitted quantity; name those to fit, out of {', '.join(known)}")
    for path in paths:
        if paths.count(path) > 1:
            raise FitError(f"{path} is named {paths.count(path)} times; name each quantity once")
        if path not in known:
            raise FitError(f"{profile.name} has no quantity {path!r}; it has {', '.join(known)}")
        if number(known[path]) <= 0:
            raise FitError(f"{path} is 0 in {profile.name}; a fit needs a positive value to start from: state a guess")
    return {path: number(known[path]) for path in paths}


def _timed(case: Case) -> Iterable[tuple[Metric, float]]:
    return ((metric, value) for metric, value in case.measurements().items() if metric is not Metric.PEAK_GPU)


def _jacobian(
    residuals: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    logs: npt.NDArray[np.float64],
    *,
    lows: npt.NDArray[np.float64],
    highs: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return central differences over steps that are larger than the kinks of simulated schedules."""
    columns = []
    for i in range(len(logs)):
        ends = []
        for sign in (1, -1):
            moved = logs.copy()
            moved[i] = min(max(logs[i] + sign * _STEP, lows[i]), highs[i])
            ends.append((residuals(moved), moved[i]))
        (above, up), (below, down) = ends
        columns.append((above - below) / (up - down))
    return np.stack(columns, axis=1)


def _standard_errors(
    jacobian: npt.NDArray[np.float64], residuals: npt.NDArray[np.float64], paths: Sequence[str]
) -> list[float]:
    """Return standard errors of the logarithms, from the Gauss-Newton covariance."""
    freedom = max(len(residuals) - len(paths), 1)
    variance = max(float(residuals @ residuals) / freedom, 1e-6)
    values, vectors = np.linalg.eigh(jacobian.T @ jacobian)
    errors = np.sqrt((vectors**2 / np.maximum(values, 1e-12)).sum(axis=1) * variance)
    if unknown := [path for path, error in zip(paths, errors, strict=True) if error > _UNDETERMINED]:
        raise FitError(
            f"these runs do not determine {', '.join(unknown)}: other values would explain them as well; "
            "leave out of the fit what another of them stands for, or add runs that depend on it"
        )
    return [float(error) for error in errors]


def predictions(profile: HardwareProfile, cases: Iterable[Case]) -> dict[str, Outcome]:
    """Return the predictions for cases on a profile, by id."""
    return {case.id: case.predict(profile) for case in cases}
