import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_figures import figures

from hwprofiles.quantity import Provenance
from ullage.whatif.money import charged, pareto_front
from ullage.whatif.prices import Extra, MachinePrice, Prices, example_prices, load_prices
from ullage.whatif.study import Checkpoints, Cost, Point, Result, StudyRequest, Varied

ASSUMED = Provenance(origin="assumed", source="a test")


def point(tokens_per_s: float, cost: float | None = None, model: str = "m", **options: object) -> Point:
    return Point(
        settings={},
        hardware="box",
        model=model,
        key="",
        result=Result(status="fits", figures=figures(tokens_per_s)),
        cost=None if cost is None else Cost(per_hour=1.0, per_million_tokens=cost),
        **options,
    )


def test_costs_are_those_of_a_bill():
    prices = Prices(
        currency="EUR",
        machines={"box": MachinePrice(per_device_hour=2.0, per_node_hour=3.0, provenance=ASSUMED)},
        extras={"host.memory_bytes": Extra(amount=1e9, price=7.3, per="month")},
    )
    more = Varied(before=100e9, after=150e9)
    example = StudyRequest(set={}, tokens=36e9, deadline_s=9e3)
    (found,), notes = charged([point(1e6 * 3.6, varied={"host.memory_bytes": more, "pcie": more})], prices, example)
    per_hour = 8 * 2.0 + 3.0 + 50 * 7.3 / 730
    assert found.cost.per_hour == pytest.approx(per_hour)
    assert found.cost.run_s == pytest.approx(1e4)
    assert found.cost.run == pytest.approx(per_hour * 1e4 / 3600)
    assert found.cost.per_million_tokens == pytest.approx(found.cost.run / 36e3)
    assert found.cost.in_time is False
    assert any("changes of pcie cost nothing" in note for note in notes)
    assert any("assumed, a test" in note for note in notes)


def test_time_that_failures_take_is_paid_for():
    prices = Prices(currency="EUR", machines={"box": MachinePrice(per_device_hour=2.0, provenance=ASSUMED)})
    steady = point(1000.0)
    saved = Checkpoints(every={"nvme": 10}, waste=0.2, overhead=0.1, most_lost_s=9.0)
    failing = steady.model_copy(
        update={"result": Result(status="fits", figures=steady.figures.model_copy(update={"checkpoints": saved}))}
    )
    (one, other), _ = charged([steady, failing], prices, StudyRequest(set={}, tokens=1e9))
    assert other.cost.per_hour == one.cost.per_hour
    for name in ("per_million_tokens", "run_s", "run"):
        assert getattr(other.cost, name) == pytest.approx(getattr(one.cost, name) / 0.8)
    assert (one.on_front, other.on_front) == (True, False)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from("ab")), max_size=12))
def test_the_front_is_what_nothing_beats(pairs):
    points = [point(speed, cost, model) for speed, cost, model in pairs]

    def beaten(i: int) -> bool:
        speed, cost, model = pairs[i]
        return any(
            m == model and s >= speed and c <= cost and ((s, c) != (speed, cost) or j < i)
            for j, (s, c, m) in enumerate(pairs)
            if j != i
        )

    assert pareto_front(points) == {i for i in range(len(pairs)) if not beaten(i)}


def test_the_packaged_example_says_that_it_is_one():
    prices = example_prices()
    assert "to be replaced" in prices.description
    assert {price.provenance.origin for price in prices.machines.values()} == {"assumed"}
    assert all("to be replaced" in price.provenance.source for price in prices.machines.values())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("{", "not JSON"), ("{}", "currency"), ('{"currency": "USD", "machines": {"a": {"per_hour": 1}}}', "machines.a")],
)
def test_bad_price_files_are_one_line(text, wanted, tmp_path):
    (tmp_path / "prices.json").write_text(text)
    with pytest.raises(ValueError, match=wanted):
        load_prices(tmp_path / "prices.json")
