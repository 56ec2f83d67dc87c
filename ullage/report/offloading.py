"""The plan with other shares of its optimizer state off the device."""

from collections.abc import Iterator

from planner.decisions import Decisions, Place
from planner.explain.bench import Bench
from planner.schedule.tasks import Tier
from planner.search.scoring import Candidate
from ullage.analysis.explanation import lacks
from ullage.analysis.runs import RunRecord
from ullage.output.formatting import percent, si
from ullage.output.progress import Report
from ullage.report.charts import Axis, Chart, Line, Section, Trace

_STEPS = 10  # steps of the share of state that is off the device


def offload_section(bench: Bench, run: RunRecord | None, measured_s: float | None, progress: Report) -> Section | None:
    """Show the cost and savings of offloading: the plan with more and less optimizer state off the device."""
    pieces = bench.pieces()
    if not pieces or bench.decisions.pipeline_parallel > 1:
        return None
    trials: list[tuple[float, Candidate]] = []
    for step, (share, decisions) in enumerate(_shares(bench, pieces)):
        progress("moving state off the device", step, _STEPS + 1)
        trials.append((share, bench.trial(decisions)))
    own = 1 - len(bench.pieces(Place.GPU)) / len(pieces)
    points = [Trace("this plan", [own], [bench.own.iteration_s], "points", "second", texts=["this plan, predicted"])]
    if measured_s is not None:
        points.append(
            Trace("this run", [own], [measured_s], "points", "third", measured=True, texts=["this run, measured"])
        )
    shares = [share for share, _ in trials]
    axis = Axis("optimizer state that is not on the device", "%")
    time = Chart(
        key="offload-time",
        title="What offloading costs",
        note="The plan with other shares of its optimizer state off the device. State that leaves is updated on the "
        "CPU or streamed, whichever is faster. The subgroups with the earliest deadlines stay.",
        x=axis,
        y=Axis("iteration", "s"),
        traces=(
            Trace(
                "predicted",
                shares,
                [trial.iteration_s for _, trial in trials],
                "curve",
                "first",
                texts=[_offload_words(trial) for _, trial in trials],
            ),
            *points,
        ),
        half=True,
    )
    memory = [Trace("predicted", shares, [float(trial.peak_bytes[Tier.GPU]) for _, trial in trials], "curve", "first")]
    memory.append(Trace("this plan", [own], [float(bench.own.peak_bytes[Tier.GPU])], "points", "second"))
    if run is not None and Tier.GPU in run.memory:
        memory.append(Trace("this run", [own], [float(run.memory[Tier.GPU])], "points", "third", measured=True))
    capacity = bench.memory[Tier.GPU].capacity_bytes
    peaks = Chart(
        key="offload-memory",
        title="What offloading saves",
        note=f"Peak memory of one device. Its capacity is {si(capacity, 'B')}.",
        x=axis,
        y=Axis("peak device memory", "B"),
        traces=tuple(memory),
        levels=(Line(float(capacity), "capacity"),),
        half=True,
    )
    fitting = [(share, trial) for share, trial in trials if trial.fits]
    words: tuple[str, ...] = ()
    if fitting and not trials[0][1].fits:
        least = min(share for share, _ in fitting)
        words = (f"At least {percent(least)} of the state must leave the device (in steps of {100 // _STEPS} %).",)
    return Section("offloading", "Offloading", "Effect of offloading", words, (time, peaks))


def _shares(bench: Bench, pieces: list[tuple[str, int]]) -> Iterator[tuple[float, Decisions]]:
    """Yield the plan's decisions with other shares of updates off the device, on the CPU or streamed."""
    places = {piece: bench.decisions.units[piece[0]].update[piece[1]] for piece in pieces}
    for step in range(_STEPS + 1):
        count = round(len(pieces) * (1 - step / _STEPS))
        stay, leave = pieces[:count], pieces[count:]
        moved = [piece for piece in leave if places[piece] is Place.GPU]
        ways = [
            bench.placed(dict.fromkeys(stay, Place.GPU) | dict.fromkeys(moved, place))
            for place in ((Place.CPU, Place.STREAM) if moved else (Place.CPU,))
        ]
        yield len(leave) / len(pieces), min(ways, key=lambda decisions: bench.trial(decisions).order)


def _offload_words(trial: Candidate) -> str:
    return f"{si(trial.iteration_s, 's')}, {si(trial.peak_bytes[Tier.GPU], 'B')} of device memory" + (
        "" if trial.fits else f", {lacks(trial)}"
    )
