import json
import re
from pathlib import Path

import pytest
from made_figures import figures

from hwprofiles.registry import load_profile
from planner.schedule.tasks import Lane
from ullage.output.formatting import si
from ullage.report.study import sensitivity_table
from ullage.whatif.design import Space
from ullage.whatif.fields import of_machine
from ullage.whatif.prices import example_prices
from ullage.whatif.questions import answer
from ullage.whatif.running.point import plan_point
from ullage.whatif.running.runner import Evaluator
from ullage.whatif.running.store import Store
from ullage.whatif.sensitivity import STEP, sensitivities
from ullage.whatif.study import Result, StudyRequest
from ullage.whatif.values import Number


def answered(tiny, question, tmp_path, prices=None, set_=None, **options):
    space = Space(StudyRequest(set={"model": tiny, **(set_ or {})}, question=question, **options))
    with Store(tmp_path / "s.jsonl") as store:
        return space, answer(Evaluator(space, store, prices))


def test_fits_finds_the_least_that_fits(tiny, tmp_path):
    space, found = answered(tiny, "fits", tmp_path, set_={"hardware": "a100x4-40g"})
    statuses = [(point.settings["gpus"], point.result.status) for point in found.points]
    (least,) = found.answer.least
    assert statuses[-1] == (least.num_devices, "fits")
    assert all(status == "lacks-memory" for _, status in statuses[:-1])
    for name, value in {
        "device.memory_bytes": least.device_memory_bytes,
        "host.memory_bytes": least.host_memory_bytes,
    }.items():
        fits = [
            plan_point(
                space.case({"gpus": least.num_devices, name: Number(value * share)}, "fit").request, "fit"
            ).status
            for share in (1.0, 0.94)
        ]
        assert fits[0] == "fits"
        least_tried = of_machine(load_profile("a100x4-40g"), name) / 1024
        assert fits[1] == "lacks-memory" or value == pytest.approx(least_tried)
    assert str(least.num_devices) in found.answer.words[0]


def test_cheapest_is_the_cheapest_in_time(tiny, tmp_path):
    prices, machine = example_prices(), {"hardware": "a100-80", "gpus": "8"}
    _, found = answered(tiny, "cheapest", tmp_path, prices, tokens=2.88e8, deadline_s=600.0, set_=machine)
    in_time = [point for point in found.points if point.cost and point.cost.in_time]
    assert 0 < len(in_time) < len([point for point in found.points if point.cost])
    best = found.points[found.answer.points[0]]
    assert best.cost.run == min(point.cost.run for point in in_time)
    assert found.answer.words[0].startswith(f"Cheapest within 10 min: {best.settings['gpus']} x {best.hardware}")
    (tmp_path / "more").mkdir()
    _, late = answered(
        tiny,
        "cheapest",
        tmp_path / "more",
        prices,
        tokens=1e15,
        deadline_s=1.0,
        set_={"hardware": "a100-80", "gpus": "1"},
    )
    assert late.answer.words[0].startswith("None of the 1 machines")
    for missing in ({"prices": None, "tokens": 1e9}, {"prices": prices}):
        with pytest.raises(ValueError, match="needs --"):
            answered(tiny, "cheapest", tmp_path, **missing)


def test_upgrade_orders_by_what_it_buys(tiny, tmp_path):
    _, found = answered(tiny, "upgrade", tmp_path, example_prices(), set_={"hardware": "a100-80"})
    present, *changes = found.answer.points
    assert found.points[present].settings["change"] == "as it is", "what the others are held against"
    speeds = [found.points[at].figures.tokens_per_s for at in changes]
    assert speeds == sorted(speeds, reverse=True)
    assert "gpus 2x" in found.answer.words[0]  # every device has its own batch
    doubled = {p.settings["change"]: p for p in found.points}
    assert doubled["host-link 2x"].varied["host-link"].after == pytest.approx(
        2 * doubled["host-link 2x"].varied["host-link"].before
    )
    assert len(found.axes[0].values) == len(found.points)


def test_scale_tells_efficiency(tiny, tmp_path):
    _, found = answered(tiny, "scale", tmp_path, set_={"hardware": "a100-80", "gpus": "8"})
    assert [point.settings["gpus"] for point in found.points] == [1, 2, 4, 8]
    first = found.points[0].figures
    for point, share in zip(found.points, found.answer.efficiency, strict=True):
        assert share == pytest.approx(point.figures.tokens_per_s / point.figures.num_devices / first.tokens_per_s)


def test_the_longest_sequence_fits_and_a_little_longer_one_does_not(tiny, tmp_path):
    machine = {"hardware": "a100-80", "device.memory_bytes": "2e9", "gpus": "1"}
    _, found = answered(tiny, "longest", tmp_path, set_=machine)
    assert [point.settings["storage"] for point in found.points] == ["never", "activations", "nvme"]
    for point, words in zip(found.points, found.answer.words, strict=True):
        longest = point.settings["seq_len"]
        shorter, longer = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{4,}", words)[:2])
        assert (shorter, point.result.status) == (longest, "fits")
        assert longest < longer <= 1.05 * longest + 256
        assert point.figures.choice.endswith("1 micro-batch(es) of 1")
        more = {**machine, "storage": point.settings["storage"], "seq_len": str(longer), "micro_batch": "1"}
        assert (
            plan_point(Space(StudyRequest(set={"model": tiny, **more})).case({}, "fit").request, "fit").status != "fits"
        )
    assert found.points[1].settings["seq_len"] >= found.points[0].settings["seq_len"]


def test_the_longest_sequence_says_where_the_model_ends(tmp_path):
    _, found = answered("gpt2", "longest", tmp_path, set_={"hardware": "h100", "storage": "never"})
    assert found.points[0].settings["seq_len"] == 1024
    assert "sequence length 1280 exceeds the 1024 positions that gpt2 has learned" in found.answer.words[0]


def test_the_largest_model_fits_and_the_next_does_not(tiny, tmp_path):
    models = []
    for width in (64, 128, 256, 512, 1024, 2048, 4096):
        sizes = {"hidden_size": width, "intermediate_size": 4 * width}
        models.append(tmp_path / f"{width}.json")
        models[-1].write_text(json.dumps(json.loads(Path(tiny).read_text()) | sizes))
    machine = {"hardware": "a100-80", "device.memory_bytes": "2e9", "host.memory_bytes": "1e9", "storage": "never"}
    sweep = {"model": (",".join(map(str, models)),)}
    with Store(tmp_path / "s.jsonl") as store:
        space = Space(StudyRequest(set=machine, sweep=sweep, question="largest"))
        found = answer(Evaluator(space, store))
    fits = [plan_point(space.case({"model": str(m), "micro_batch": 1}, "fit").request, "fit").status for m in models]
    number = fits.count("fits")
    assert fits == ["fits"] * number + ["lacks-memory"] * (len(models) - number)
    assert 1 < number < len(models)
    (point,) = found.points
    assert (point.settings["model"], point.result.status) == (str(models[number - 1]), "fits")
    assert (
        f"largest of 7 models that train on 1 x a100-80 with --storage never (no plan was found for {models[number]}"
        in str(found.answer.words)
    )
    with pytest.raises(ValueError, match="leave out --model"):
        answered(tiny, "largest", tmp_path)


def test_questions_choose_their_own_points(tiny, tmp_path):
    with pytest.raises(ValueError, match="leave out --sweep pcie"):
        answered(tiny, "scale", tmp_path, sweep={"pcie": ("1x,2x",)})


def limited_by_gemm_or_launch(tasks, effort):
    """Plan on a machine that everything is known of: products take 1 s at the base's rate, and issuing takes 0.5 s."""
    assert effort == "plan"
    base = of_machine(load_profile("a100-80"), "device-gemm")
    for task in tasks:
        products_s = base / of_machine(task.request.hardware, "device-gemm")
        lane = Lane.COMPUTE if products_s > 0.5 else Lane.LAUNCH
        found = figures(1.0, num_devices=1).model_copy(
            update={"iteration_s": max(products_s, 0.5), "critical_s": {lane: 1.0}}
        )
        yield task.key, Result(status="fits", figures=found)


def test_sensitivities_and_crossings_of_a_known_machine(tiny, tmp_path):
    space = Space(StudyRequest(set={"model": tiny, "hardware": "a100-80"}))
    with Store(tmp_path / "s.jsonl") as store:
        found = sensitivities(Evaluator(space, store, runner=limited_by_gemm_or_launch))
    rows = {row.name: row for row in found.rows}
    gemm = rows.pop("device-gemm")
    assert gemm is found.rows[0]
    assert gemm.elasticity_more == pytest.approx(-1.0) == gemm.elasticity_less
    assert gemm.seconds_per_step == pytest.approx(-1e12 / gemm.value) == -gemm.saved_s
    noise = gemm.model_copy(update={"elasticity_more": -0.04, "seconds_per_step": -0.01})
    assert noise.saved_s == 0.0
    text = str(sensitivity_table(found.model_copy(update={"rows": (gemm, noise)})).rows)
    assert "1 TFLOP/s: about nothing" in text
    assert f"1 TFLOP/s: -{si(gemm.saved_s, 's')}" in text
    assert (gemm.more.factor, gemm.less.factor) == (pytest.approx(1 + STEP), pytest.approx(1 / (1 + STEP)))
    assert gemm.below is None
    assert 2.0 <= gemm.above.factor <= 2.0 * 1.1
    assert gemm.above.value == pytest.approx(gemm.above.factor * gemm.value)
    assert gemm.above.bound_by is Lane.LAUNCH
    assert {"host-link", "host-memory", "host.num_cores"} <= set(rows)
    for row in rows.values():
        assert (row.elasticity_more, row.elasticity_less, row.below, row.above) == (0.0, 0.0, None, None)
