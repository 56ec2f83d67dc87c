"""Phases add up, and memory over time is what a brute-force sampler finds."""

import itertools
import math

import numpy as np
import pytest
from amount import examples
from cases import Case, cases, random_prices
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Buffer, Lane, MemoryClass, Op, Phase, Task, Tier
from planner.schedule.timeline import Span, Timeline, memory_use, peak_bytes
from planner.simulate.machine import run

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def compute(*ops: Op) -> tuple[Task, ...]:
    return tuple(Task(i, Lane.COMPUTE, op, Phase.FORWARD, unit=f"u{i}") for i, op in enumerate(ops))


def timeline(tasks: tuple[Task, ...], spans: list[list[tuple[float, float]]], buffers=()) -> Timeline:
    flat = (Span(i, t, a, b) for i, row in enumerate(spans) for t, (a, b) in enumerate(row))
    return Timeline.from_spans(Schedule(tasks, tuple(buffers)), flat, len(spans))


@settings(SLOW, max_examples=examples(50))
@given(cases(), st.integers(0, 2**32 - 1))
def test_phases_add_up_to_the_period(case: Case, seed: int) -> None:
    simulated = run(case.schedule, *random_prices(case.schedule, seed), 3)
    for iteration in range(2):
        phases = simulated.phases(iteration)
        assert min(phases.values()) >= 0
        assert sum(phases.values()) == pytest.approx(simulated.period_s(iteration), rel=1e-9, abs=1e-12)
    periods_s = sum(simulated.period_s(iteration) for iteration in range(3))
    assert periods_s <= simulated.makespan_s() * (1 + 1e-9)
    for iteration in range(3):
        busy = simulated.busy_s(iteration)
        assert sum(busy.values()) == pytest.approx(sum(s.end_s - s.start_s for s in simulated.of_iteration(iteration)))


def test_phases_by_hand() -> None:
    """Waits belong to what is waited in; the rest of the period is the update."""
    forward, recompute, backward = Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD
    tasks = compute(forward, forward, recompute, backward, forward, backward)
    first = [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (6.0, 8.0), (8.5, 9.0), (10.0, 12.0)]
    second = [(15.0, 16.0), *((a + 14, b + 14) for a, b in first[1:])]
    two = timeline(tasks, [first, second])
    assert list(two.phases(0).values()) == [(5.0 - 1.0) + (10.0 - 8.5), (8.5 - 5.0) + 2.0, 3.0, 0.0]
    assert (two.period_s(0), two.period_s(1), two.makespan_s()) == (14.0, 11.0, 25.0)
    assert two.phases(1)[Phase.UPDATE] == 0.0
    assert two.busy_s(0) == {Lane.COMPUTE: 7.5}


def test_spans_round_trip_in_any_order() -> None:
    tasks = compute(Op.FORWARD, Op.BACKWARD)
    spans = [Span(1, 0, 2.0, 3.0), Span(0, 1, 1.0, 2.0), Span(0, 0, 0.0, 1.0)]
    partial = Timeline.from_spans(Schedule(tasks), spans, 2)
    assert list(partial.spans) == sorted(spans, key=lambda span: (span.iteration, span.task))
    assert partial.num_iterations == 2
    assert np.isnan(partial.end_s[1, 1])


@st.composite
def held(draw: st.DrawFn) -> Timeline:
    """Tasks anywhere in time, and buffers between them, also over the end of the iteration, on a grid of quarters."""
    count = draw(st.integers(1, 6))
    quarters = st.integers(0, 20).map(lambda n: n / 4)
    row = []
    for _ in range(count):
        start_s = draw(quarters)
        row.append((start_s, start_s + draw(quarters)))
    tasks = (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD),
        *(Task(i + 1, Lane.CPU, Op.PASS, Phase.UPDATE) for i in range(count)),
    )
    period_s = draw(st.integers(1, 24)) / 4
    first = [(0.0, 0.25), *row]
    indices = st.integers(0, count)
    kinds = st.sampled_from(MemoryClass)
    buffers = [
        Buffer(Tier.GPU, draw(kinds), draw(st.integers(1, 9)), str(i), draw(indices), draw(indices))
        for i in range(draw(st.integers(1, 5)))
    ]
    buffers.append(Buffer(Tier.GPU, MemoryClass.PARAMETERS, draw(st.integers(1, 9)), "always"))
    spans = [[(a + i * period_s, b + i * period_s) for a, b in first] for i in range(2)]
    return timeline(tasks, spans, buffers)


@settings(SLOW, max_examples=examples(200))
@given(held())
def test_memory_is_what_a_sampler_finds(two: Timeline) -> None:
    """Every copy of every buffer that a steady run of many iterations holds at a moment is counted one by one."""
    period_s, spans = two.period_s(0), list(two.of_iteration(0))
    use = memory_use(two, 0)[Tier.GPU]

    def sample(at_s: float) -> dict[MemoryClass, int]:
        totals = dict.fromkeys(use.num_bytes, 0)
        for buffer in two.schedule.buffers:
            if buffer.first is None or buffer.last is None:
                totals[buffer.memory_class] += buffer.num_bytes
                continue
            begin_s, end_s = spans[buffer.first].start_s, spans[buffer.last].end_s
            end_s += period_s if buffer.last < buffer.first else 0.0
            copies = range(-60, 60)
            totals[buffer.memory_class] += buffer.num_bytes * sum(
                begin_s + i * period_s <= at_s < end_s + i * period_s for i in copies
            )
        return totals

    moments = [i / 8 for i in range(math.ceil(period_s * 8))]
    for at_s in moments:
        row = max((i for i, time_s in enumerate(use.times_s) if time_s <= at_s), default=None)
        assert row is not None
        assert {kind: amounts[row] for kind, amounts in use.num_bytes.items()} == sample(at_s)
    assert use.peak_bytes == max(sum(sample(at_s).values()) for at_s in moments)
    assert sum(use.peak_by_class.values()) == use.peak_bytes


def test_a_slot_handed_over_is_not_held_twice() -> None:
    """What ends when another begins is freed first, whatever the moment is in binary."""
    # Far apart, so that a length added to a start does not always give the end.
    moments = [0.0, *(1e-6 * np.random.default_rng(0).uniform(2.0, 4.0, size=20).cumprod()).tolist()]
    row = list(itertools.pairwise(moments))
    buffers = [Buffer(Tier.GPU, MemoryClass.ACTIVATIONS, 100, str(i), i, i) for i in range(len(row))]
    spans = [[(a + 1e12 * i, b + 1e12 * i) for a, b in row] for i in range(2)]
    held_once = timeline(compute(*[Op.FORWARD] * len(row)), spans, buffers)
    assert memory_use(held_once, 0)[Tier.GPU].peak_bytes == 100
    assert peak_bytes(held_once, 0) == {Tier.GPU: {0: 100}}


@settings(SLOW, max_examples=examples(30))
@given(cases(), st.integers(0, 2**32 - 1))
def test_memory_of_a_schedule_returns_to_where_it_began(case: Case, seed: int) -> None:
    simulated = run(case.schedule, *random_prices(case.schedule, seed), 3)
    assume(simulated.period_s(1) > 0)
    uses = memory_use(simulated, 1)
    assert peak_bytes(simulated, 1) == {tier: {0: use.peak_bytes} for tier, use in uses.items()}
    for use in uses.values():
        assert len(use.times_s) == len(set(use.times_s))
        assert use.times_s[0] == 0.0
        assert 0.0 <= use.times_s[-1] <= simulated.period_s(1)


def test_memory_that_is_empty_when_an_iteration_begins_starts_with_zero() -> None:
    buffers = [Buffer(Tier.HOST, MemoryClass.GRADIENTS, 100, "late", 1, 1)]
    late = timeline(compute(Op.FORWARD, Op.BACKWARD), [[(0.0, 1.0), (1.0, 2.0)], [(2.0, 3.0), (3.0, 4.0)]], buffers)
    use = memory_use(late, 0)[Tier.HOST]
    assert use.times_s == (0.0, 1.0)
    assert use.num_bytes[MemoryClass.GRADIENTS] == (0, 100)


def test_where_nothing_is_held_there_are_no_peaks() -> None:
    none = timeline(compute(Op.FORWARD), [[(0.0, 1.0)], [(1.0, 2.0)]])
    assert peak_bytes(none, 0) == memory_use(none, 0) == {}
