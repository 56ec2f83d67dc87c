"""Run a study: plan the points that are not in the store, and collect all results."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from hwprofiles import __version__
from ullage.output.progress import Report
from ullage.whatif.design import Case, Space
from ullage.whatif.money import charged
from ullage.whatif.prices import Prices
from ullage.whatif.running.point import Effort
from ullage.whatif.running.store import Store
from ullage.whatif.running.workers import Runner, Task
from ullage.whatif.study import Axis, Point, Result, Study


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Plans points with a store and a runner.

    Attributes:
        store: store of results.
        runner: function that plans points.
        progress: called with the present step in words, the finished points and the number of points.
    """

    store: Store
    runner: Runner
    progress: Report = lambda *_: None

    def results(self, cases: Iterable[Case], effort: Effort, what: str = "planning") -> list[Result]:
        """Return the results of points. Points whose results are in the store are not planned again.

        Raises:
            KeyboardInterrupt: Ctrl-C; all results until then are in the store.
            OSError: the store cannot be written.
        """
        wanted = list(cases)
        todo: dict[str, Task] = {
            case.key: (case.key, case.request, case.checkpoints)
            for case in sorted(wanted, key=_similarity_key)
            if case.request and self.store.get(case.key) is None
        }
        keys = {case.key for case in wanted if case.request}
        done = len(keys) - len(todo)
        self.progress(what, done, len(keys))
        if todo:
            try:
                for key, result in self.runner(todo.values(), effort):
                    self.store.put(key, result)
                    done += 1
                    self.progress(what, done, len(keys))
            except KeyboardInterrupt:
                self.store.look_again()
                done = sum(self.store.get(key) is not None for key in keys)
                raise KeyboardInterrupt(
                    f"interrupted; {done} of {len(keys)} points are stored in {self.store.path}; run the same command "
                    "again to continue"
                ) from None
        return [self._result(case) for case in wanted]

    def points(self, cases: Iterable[Case], effort: Effort) -> list[Point]:
        """Return points with their results; see :meth:`results`."""
        planned = list(cases)
        return [
            Point(
                settings=case.settings,
                varied=case.varied,
                hardware=case.hardware,
                model=case.model,
                key=case.key,
                result=result,
            )
            for case, result in zip(planned, self.results(planned, effort), strict=True)
        ]

    def _result(self, case: Case) -> Result:
        result = case.refused or self.store.get(case.key)
        assert result is not None, "all points are planned"
        return result


def _similarity_key(case: Case) -> tuple[str | float, ...]:
    """Return a sort key that makes points with equal schedules neighbours, because schedules are cached."""
    request = case.request
    if request is None:
        return ()
    machine = request.hardware
    sizes = (machine.device.memory_bytes.value, machine.host.memory_bytes.value, machine.host.num_cores)
    return (case.model, request.num_devices, request.seq_len, *sizes)


def run_study(space: Space, prices: Prices | None, evaluator: Evaluator) -> Study:
    """Plan all points of a study and compute their costs.

    Raises:
        KeyboardInterrupt: see :meth:`Evaluator.results`.
        OSError: the store cannot be written.
    """
    cases = list(tracked(space.cases(), len(space), evaluator.progress))
    study = planned_study(space, cases, space.axes, prices, evaluator)
    return study.model_copy(update={"notes": (*study.notes, *_warnings(study.points))})


def planned_study(
    space: Space, cases: Iterable[Case], axes: tuple[Axis, ...], prices: Prices | None, evaluator: Evaluator
) -> Study:
    """Return a study of some points with their costs. It raises as :func:`run_study`."""
    points, notes = charged(evaluator.points(cases, space.effort), prices, space.request)
    return Study(
        program_version=__version__,
        request=space.request,
        axes=axes,
        prices=prices,
        points=tuple(points),
        complete=True,
        notes=tuple(notes),
    )


def tracked(cases: Iterable[Case], total: int, progress: Report) -> Iterator[Case]:
    """Yield points, and report each to ``progress``, because making the points takes time too."""
    for done, case in enumerate(cases):
        progress("preparing", done, total)
        yield case


def _warnings(points: Iterable[Point]) -> list[str]:
    """Return the warnings of all points, each once, with the number of its points."""
    counts = Counter(warning for point in points if point.figures for warning in point.figures.warnings)
    return [f"{warning} ({count} point(s))" for warning, count in counts.items()]
