"""Alternatives to the plan: other engines, the plan without one technique, and other shares of state off the device."""

from collections.abc import Iterator

from planner.decisions import Decisions, Place
from planner.explain.trial import Bench, Trial
from planner.explain.tricks import worths
from planner.plan.document import EngineRow, Plan
from planner.schedule.tasks import Tier
from ullage.analysis.explanation import change, lacks
from ullage.analysis.runs import RunRecord
from ullage.output.formatting import percent, si, signed_percent
from ullage.output.plans import engine_fits, engine_setting
from ullage.output.progress import Report
from ullage.report.charts import Axis, Chart, Level, Mark, Section, Table, Trace
from ullage.rivals.tricks import TRICKS

_STEPS = 10  # steps of the share of state that is off the device


def engines_section(plan: Plan, measured_s: float | None) -> Section:
    """Show the iteration times of other engines."""
    ours_s = plan.prediction.iteration_s
    rows = [
        EngineRow(
            name="ullage (this plan)", setting="", fits=plan.prediction.fits, iteration_s=ours_s, missing_bytes={}
        )
    ]
    rows += plan.engines
    timed = [row for row in rows if row.iteration_s is not None]
    colours = ["first" if row is rows[0] else "quiet" if row.fits else "bad" for row in timed]
    texts = [_engine_words(row, ours_s) for row in timed]
    traces = [
        Trace(
            "predicted",
            [row.iteration_s or 0.0 for row in timed],
            [row.name for row in timed],
            Mark.BARS,
            colours,
            texts=texts,
        )
    ]
    if measured_s is not None:
        words = [f"{si(measured_s, 's')} measured"]
        traces.append(
            Trace("measured", [measured_s], ["ullage (this run)"], Mark.BARS, "first", measured=True, texts=words)
        )
    chart = Chart(
        key="engines",
        title="Engines side by side",
        note="One iteration of the same model on the same machine, each engine at its best setting, by the same "
        "simulator.",
        x=Axis("iteration", "s"),
        traces=tuple(traces),
        bars="overlay",
    )
    table = Table(
        "Engines and their settings",
        ("engine", "iteration", "ratio", "fits", "setting"),
        tuple(
            (
                row.name,
                si(row.iteration_s, "s") if row.iteration_s else "-",
                f"{row.iteration_s / ours_s:.2f}" if row.iteration_s else "-",
                engine_fits(row),
                engine_setting(row),
            )
            for row in rows
        ),
    )
    words = []
    if fitting := [row for row in plan.engines if row.fits and row.iteration_s]:
        best = min(fitting, key=lambda row: row.iteration_s or 0.0)
        words.append(
            f"The best other engine that fits is {best.name}: it takes {(best.iteration_s or 0.0) / ours_s:.2f} x as "
            "long."
        )
    elif plan.engines:
        words.append("No other engine fits in memory.")
    return Section("engines", "Engines", "Engines side by side", tuple(words), (chart, table))


def _engine_words(row: EngineRow, ours_s: float) -> str:
    assert row.iteration_s is not None
    ratio = row.iteration_s / ours_s
    return f"{si(row.iteration_s, 's')}, {ratio:.2f} x{'' if row.fits else ', ' + engine_fits(row)}"


def tricks_section(bench: Bench, progress: Report) -> Section:
    """Show the effect of each technique: the plan simulated without it."""
    found = worths(bench, lambda done: progress("switching tricks off", done, 0), TRICKS)
    used = [(worth.trick, worth.trial) for worth in found if worth.trial is not None]
    used.sort(key=lambda item: -change(bench, item[1])[0])
    chart = Chart(
        key="tricks",
        title="What each technique is worth",
        note="Extra time of an iteration without the technique; the rest of the plan does not change. Below zero: the "
        "iteration is faster, but does not fit in memory.",
        x=Axis("longer iteration", "s"),
        traces=(
            Trace(
                "without it",
                [change(bench, trial)[0] for _, trial in used],
                [trick.words for trick, _ in used],
                Mark.BARS,
                ["first" if trial.fits else "bad" for _, trial in used],
                texts=[_worth_words(bench, trial) for _, trial in used],
            ),
        ),
    )
    rows = tuple(
        (
            trick.words,
            trick.without,
            si(trial.iteration_s, "s"),
            si(change(bench, trial)[0], "s"),
            signed_percent(change(bench, trial)[1]),
            lacks(trial),
        )
        for trick, trial in used
    )
    unused = [worth.trick.words for worth in found if worth.trial is None]
    note = f"Not used by this plan: {'; '.join(unused)}." if unused else ""
    table = Table(
        "Each technique switched off alone", ("technique", "instead", "iteration", "longer by", "", "fits"), rows, note
    )
    return Section("tricks", "Techniques", "What each technique is worth", (), (chart, table) if used else (table,))


def _worth_words(bench: Bench, trial: Trial) -> str:
    seconds, share = change(bench, trial)
    return f"{si(seconds, 's')} ({signed_percent(share)})" + ("" if trial.fits else f", {lacks(trial)}")


def offload_section(bench: Bench, run: RunRecord | None, measured_s: float | None, progress: Report) -> Section | None:
    """Show the cost and savings of offloading: the plan with more and less optimizer state off the device."""
    pieces = bench.pieces()
    if not pieces or bench.decisions.pipeline_parallel > 1:
        return None
    trials: list[tuple[float, Trial]] = []
    for step, (share, decisions) in enumerate(_shares(bench, pieces)):
        progress("moving state off the device", step, _STEPS + 1)
        trials.append((share, bench.trial(decisions)))
    own = 1 - len(bench.pieces(Place.GPU)) / len(pieces)
    points = [Trace("this plan", [own], [bench.own.iteration_s], Mark.POINTS, "second", texts=["this plan, predicted"])]
    if measured_s is not None:
        points.append(
            Trace("this run", [own], [measured_s], Mark.POINTS, "third", measured=True, texts=["this run, measured"])
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
                Mark.CURVE,
                "first",
                texts=[_offload_words(trial) for _, trial in trials],
            ),
            *points,
        ),
        half=True,
    )
    memory = [
        Trace("predicted", shares, [float(trial.peak_bytes(Tier.GPU)) for _, trial in trials], Mark.CURVE, "first")
    ]
    memory.append(Trace("this plan", [own], [float(bench.own.peak_bytes(Tier.GPU))], Mark.POINTS, "second"))
    if run is not None and Tier.GPU in run.memory:
        memory.append(Trace("this run", [own], [float(run.memory[Tier.GPU])], Mark.POINTS, "third", measured=True))
    capacity = bench.own.memory[Tier.GPU].capacity_bytes
    peaks = Chart(
        key="offload-memory",
        title="What offloading saves",
        note=f"Peak memory of one device. Its capacity is {si(capacity, 'B')}.",
        x=axis,
        y=Axis("peak device memory", "B"),
        traces=tuple(memory),
        levels=(Level(float(capacity), "capacity"),),
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


def _offload_words(trial: Trial) -> str:
    return f"{si(trial.iteration_s, 's')}, {si(trial.peak_bytes(Tier.GPU), 'B')} of device memory" + (
        "" if trial.fits else f", {lacks(trial)}"
    )
