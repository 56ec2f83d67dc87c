import bisect
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from hwprofiles.quantity import Curve, CurvePoint, Provenance, Quantity

PROVENANCE = Provenance(origin="assumed", source="a test")


def make_curve(sizes, times):
    points = tuple(CurvePoint(size=s, p10_s=t, median_s=t, p90_s=t) for s, t in zip(sizes, times, strict=True))
    return Curve(size_unit="bytes", points=points, provenance=PROVENANCE)


@st.composite
def curves(draw, min_points=1):
    n = draw(st.integers(min_points, 8))
    steps = draw(st.lists(st.floats(1.01, 1e3), min_size=n, max_size=n))
    rises = draw(st.lists(st.floats(1.0, 1e3), min_size=n, max_size=n))
    sizes, times = [draw(st.floats(1.0, 1e6))], [draw(st.floats(1e-6, 1.0))]
    for step, rise in zip(steps[1:], rises[1:], strict=True):
        sizes.append(sizes[-1] * step)
        times.append(times[-1] * rise)
    return make_curve(sizes, times)


@given(curves())
def test_a_curve_passes_through_its_points(curve):
    for point in curve.points:
        assert curve.time_s(point.size) == pytest.approx(point.median_s, rel=1e-9)


@given(curves(min_points=2), st.floats(0.0, 1.0))
def test_between_two_points_it_is_straight_in_log_log_space(curve, share):
    for a, b in zip(curve.points, curve.points[1:], strict=False):
        size = math.exp(math.log(a.size) + share * math.log(b.size / a.size))
        wanted = math.exp(math.log(a.median_s) + share * math.log(b.median_s / a.median_s))
        assert curve.time_s(size) == pytest.approx(wanted, rel=1e-6)


@given(curves(), st.floats(1e-3, 1e30), st.floats(1e-3, 1e30))
def test_more_never_takes_less_time(curve, one, other):
    small, large = sorted((one, other))
    assert curve.time_s(small) <= curve.time_s(large) * (1 + 1e-9)


@given(curves(), st.floats(1.001, 1e6))
def test_outside_its_sizes_a_curve_stays_between_constant_and_proportional(curve, factor):
    first, last = curve.points[0], curve.points[-1]
    below, above = first.size / factor, last.size * factor
    assert first.median_s / factor <= curve.time_s(below) * (1 + 1e-9)
    assert curve.time_s(below) <= first.median_s * (1 + 1e-9)
    assert curve.time_s(above) == pytest.approx(last.median_s * factor)


def test_the_first_slope_is_continued_and_the_last_rate():
    curve = make_curve([1, 100], [1.0, 10.0])  # slope 1/2
    assert curve.time_s(0.01) == pytest.approx(0.1)
    assert curve.time_s(1e4) == pytest.approx(1000.0)


def test_one_point_means_a_constant_rate():
    assert make_curve([10], [2.0]).time_s(30) == pytest.approx(6.0)


@given(curves())
def test_nothing_takes_no_time(curve):
    assert curve.time_s(0) == 0.0


@given(curves(), st.floats(1e-3, 1e30))
def test_the_best_rate_is_reached_at_a_point_and_exceeded_nowhere(curve, size):
    best = curve.best_rate_per_s()
    assert any(math.isclose(best, p.size / p.median_s) for p in curve.points)
    assert size / curve.time_s(size) <= best * (1 + 1e-9)


@given(curves(min_points=2), st.randoms(use_true_random=False))
def test_points_out_of_order_are_refused(curve, random):
    points = list(curve.points)
    random.shuffle(points)
    assume([p.size for p in points] != sorted(p.size for p in points))
    with pytest.raises(ValidationError, match="sizes must increase"):
        Curve(size_unit="bytes", points=tuple(points), provenance=PROVENANCE)


@given(curves(min_points=2), st.data())
def test_time_that_falls_with_size_is_refused(curve, data):
    at = data.draw(st.integers(1, len(curve.points) - 1))
    sizes = [p.size for p in curve.points]
    times = [p.median_s for p in curve.points]
    times[at] = times[at - 1] / 2
    assert bisect.bisect_left(sizes, sizes[at]) == at
    with pytest.raises(ValidationError, match="time must not fall"):
        make_curve(sizes, times)


@pytest.mark.parametrize(
    "point",
    [
        {"size": 0, "p10_s": 1, "median_s": 1, "p90_s": 1},
        {"size": 1, "p10_s": 0, "median_s": 1, "p90_s": 1},
        {"size": 1, "p10_s": 2, "median_s": 1, "p90_s": 3},
        {"size": 1, "p10_s": 1, "median_s": 3, "p90_s": 2},
        {"size": math.inf, "p10_s": 1, "median_s": 1, "p90_s": 1},
        {"size": 1, "p10_s": 1, "median_s": math.nan, "p90_s": 1},
    ],
)
def test_malformed_points_are_refused(point):
    with pytest.raises(ValidationError):
        CurvePoint.model_validate(point)


def test_a_curve_needs_a_point():
    with pytest.raises(ValidationError):
        make_curve([], [])


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_quantity_is_a_finite_amount(value):
    with pytest.raises(ValidationError):
        Quantity(value=value, unit="bytes", provenance=PROVENANCE)


def test_a_source_cannot_be_left_out():
    with pytest.raises(ValidationError):
        Provenance.model_validate({"origin": "published", "source": ""})


def test_profile_types_are_immutable():
    with pytest.raises(ValidationError):
        PROVENANCE.source = "another"
