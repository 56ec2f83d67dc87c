"""Run a study: plan the points that are not in the store, and collect all results."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from hwprofiles import __version__
from ullage.output.progress import Report
from ullage.whatif.design import Space
from ullage.whatif.money import charged
from ullage.whatif.prices import Prices
from ullage.whatif.running.point import Effort, PointRequest
from ullage.whatif.running.store import Store
from ullage.whatif.running.workers import Runner, in_this_process
from ullage.whatif.study import Axis, Point, Result, Study

_K = TypeVar("_K")


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Plans the points of a study.

    Attributes:
        space: all points of the study.
        store: store of results.
        prices: prices for the costs of points.
        runner: function that plans points.
        progress: called with the present step in words, the finished points and the number of points.
    """

    space: Space
    store: Store
    prices: Prices | None = None
    runner: Runner = in_this_process
    progress: Report = lambda *_: None

    def results(
        self, cases: Iterable[PointRequest], what: str = "planning", effort: Effort | None = None
    ) -> list[Result]:
        """Return the results of points. Points whose results are in the store are not planned again.

        Args:
            cases: the points.
            what: what they are for, in words.
            effort: effort for each point. Default: that of the study.

        Raises:
            KeyboardInterrupt: Ctrl-C; all results until then are in the store.
            OSError: the store cannot be written.
        """
        wanted = list(cases)
        todo = {
            case.key: case
            for case in sorted(wanted, key=_similarity_key)
            if case.request and case.key not in self.store.results
        }
        keys = {case.key for case in wanted if case.request}
        done = len(keys) - len(todo)
        self.progress(what, done, len(keys))
        if todo:
            try:
                for key, result in self.runner(todo.values(), effort or self.space.effort):
                    self.store.put(key, result)
                    done += 1
                    self.progress(what, done, len(keys))
            except KeyboardInterrupt:
                self.store.look_again()
                done = len(keys & self.store.results.keys())
                raise KeyboardInterrupt(
                    f"interrupted; {done} of {len(keys)} points are stored in {self.store.path}; run the same command "
                    "again to continue"
                ) from None
        return [case.refused or self.store.results[case.key] for case in wanted]

    def study(self, cases: Iterable[PointRequest], axes: tuple[Axis, ...]) -> Study:
        """Return a study of some points with their costs; see :meth:`results`."""
        names = ("settings", "varied", "hardware", "model", "key")
        planned = list(cases)
        found = [
            Point(**{name: getattr(case, name) for name in names}, result=result)
            for case, result in zip(planned, self.results(planned), strict=True)
        ]
        points, notes = charged(found, self.prices, self.space.request)
        return Study(
            program_version=__version__,
            request=self.space.request,
            axes=axes,
            prices=self.prices,
            points=tuple(points),
            complete=True,
            notes=tuple(notes),
        )


def _similarity_key(case: PointRequest) -> tuple[str | float, ...]:
    """Return a sort key that makes points with equal schedules neighbours, because schedules are cached."""
    request = case.request
    if request is None:
        return ()
    machine = request.hardware
    sizes = (machine.device.memory_bytes.value, machine.host.memory_bytes.value, machine.host.num_cores)
    return (case.model, request.num_devices, request.seq_len, *sizes)


def run_study(evaluator: Evaluator) -> Study:
    """Plan all points of a study and compute their costs; see :meth:`Evaluator.results`."""
    space, cases = evaluator.space, []
    for done, case in enumerate(space.cases()):  # making the points takes time too
        evaluator.progress("preparing", done, len(space))
        cases.append(case)
    study = evaluator.study(cases, space.axes)
    warnings = Counter(warning for point in study.points if point.figures for warning in point.figures.warnings)
    notes = (f"{warning} ({count} point(s))" for warning, count in warnings.items())
    return study.model_copy(update={"notes": (*study.notes, *notes)})


def narrowed(
    brackets: Mapping[_K, tuple[Any, Any]],
    between: Callable[[_K, Any, Any], Any],
    holds: Callable[[dict[_K, Any]], Mapping[_K, bool]],
) -> dict[_K, tuple[Any, Any]]:
    """Narrow brackets by bisection, all of them at once, because points are planned in parallel.

    Args:
        brackets: by name, a value at which something holds, and one at which it does not.
        between: returns the next value to try within a bracket; ``None``: it is narrow enough.
        holds: returns whether it holds at the given values.
    """
    found = dict(brackets)
    while tried := {key: value for key, ends in found.items() if (value := between(key, *ends)) is not None}:
        for key, does in holds(tried).items():
            found[key] = (tried[key], found[key][1]) if does else (found[key][0], tried[key])
    return found
