"""plan.json: the same plan is the same bytes, and nothing in it can be changed unnoticed."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from amount import ALL
from machines import machine

from hwprofiles.files import write_whole
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.document import Plan, PlanError, load_plan
from planner.schedule.tasks import Tier
from ullage.rivals import make_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for a device too small for plain training, so that some engines have no time."""
    return make_plan(
        Request(
            resolve_model("demo-llama"), machine(gpu_bytes=1.5e8), seq_len=256, micro_batch=1, subgroup_params=10**6
        ),
        max_simulations=40,
    )


@pytest.fixture(scope="module")
def data(plan: Plan) -> dict[str, Any]:
    return json.loads(plan.to_json())


def save(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, plan.to_json())
    loaded = load_plan(path)
    assert loaded == plan
    assert loaded.to_json() == plan.to_json() == path.read_text(encoding="utf-8")
    assert loaded.schedule() == plan.schedule()
    assert any(row.iteration_s is None for row in loaded.engines)  # what was not simulated survives too
    assert loaded.gpu_memory.capacity_bytes == loaded.prediction.memory[Tier.GPU].capacity_bytes == 15 * 10**7


def test_the_order_of_keys_and_spaces_do_not_matter(plan: Plan, data: dict[str, Any], tmp_path: Path) -> None:
    backwards = dict(reversed(data.items()))
    assert load_plan(save(tmp_path / "plan.json", backwards)) == plan


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value; of long lists, the first two entries."""
    items = data.items() if isinstance(data, dict) else list(enumerate(data))[:2] if isinstance(data, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))
    if not isinstance(data, dict | list):
        yield path


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}x"


def test_any_edited_value_is_noticed(data: dict[str, Any], tmp_path: Path) -> None:
    path, tried = tmp_path / "plan.json", 0
    for *parents, last in itertools.islice(leaves(data), None, None, 1 if ALL else 3):
        edited = json.loads(json.dumps(data))
        place = edited
        for key in parents:
            place = place[key]
        place[last] = changed(place[last])
        with pytest.raises(PlanError, match=r"plan\.json"):
            load_plan(save(path, edited))
        tried += 1
    assert tried > (300 if ALL else 100)


def test_an_edited_number_is_called_an_edit(data: dict[str, Any], tmp_path: Path) -> None:
    edited = data | {"num_simulations": data["num_simulations"] + 1}
    with pytest.raises(
        PlanError, match=r"content_digest is .* was changed after it was written, or .*; make the plan again"
    ):
        load_plan(save(tmp_path / "plan.json", edited))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d | {"schema_version": 1}, "schema_version 1, but this program reads 9; make the plan again"),
        (lambda _: [1], "is not a plan; make a plan"),
        (lambda d: {k: v for k, v in d.items() if k != "content_digest"}, "content_digest is missing"),
        (lambda d: d | {"content_digest": ""}, "content_digest is missing"),
        (lambda d: d | {"colour": "red"}, "colour: Extra inputs"),
        (lambda d: {k: v for k, v in d.items() if k != "prediction"}, "prediction: Field required"),
        (lambda d: d | {"seq_len": 0}, "seq_len: .*greater than or equal to 1"),
    ],
)
def test_what_is_not_a_plan_is_refused(data: dict[str, Any], tmp_path: Path, edit: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_plan(save(tmp_path / "plan.json", edit(data)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file or directory; make a plan with"):
        load_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff{")
    with pytest.raises(PlanError, match="is not JSON"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="is a folder; make a plan with"):
        load_plan(tmp_path)


def test_writing_fails_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was there stays as it was, and nothing else is left."""
    path = tmp_path / "plan.json"
    write_whole(path, "old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "plan.json", "new")


def test_writing_replaces(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("a long first text", "ü"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("field", "message"), [("start_s", "is a run"), ("host_link", "is a profile")])
def test_another_kind_of_file_is_named(field: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(f'{{"schema_version": 1, "{field}": []}}', encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        load_plan(path)


def test_plans_tell_by_digests_what_they_are_of(plan) -> None:
    other = plan.model_copy(update={"seq_len": 2 * plan.seq_len}).sealed()
    assert (other.model_digest, other.hardware_digest) == (plan.model_digest, plan.hardware_digest)
    assert other.content_digest != plan.content_digest
    machine = plan.hardware.with_device_memory(int(plan.hardware.device.memory_bytes.value) // 2)
    smaller = plan.model_copy(update={"hardware": machine}).sealed()
    assert smaller.hardware_digest != plan.hardware_digest
    assert smaller.model_digest == plan.model_digest
