import pytest

from hwprofiles.changes import with_cores, with_devices_per_node, with_num_drives, with_optimizer_cores
from hwprofiles.paths import number, quantities
from hwprofiles.registry import load_profile
from planner.models import resolve_model
from ullage.cli.options import known_options
from ullage.whatif.fields import ALIASES, changed_machine, changed_model, field_named, fields_of, of_machine
from ullage.whatif.values import Number

MODEL = resolve_model("opt-1.3b")
FACTOR = 1.5


@pytest.mark.parametrize("name", ["a100-80", "rtx4090-12ssd", "polaris-a100-40g", "epyc-turin-2c"])
def test_every_number_of_a_machine_can_be_scaled_by_its_name(name):
    hardware = load_profile(name)
    fields = [f for f in fields_of(hardware, MODEL).values() if f.kind == "machine" and not f.switch]
    assert {f.name for f in fields} >= set(quantities(hardware))
    for field in fields:
        if field.name in {"devices_per_node", "host.num_optimizer_cores"}:  # cannot be more than there are
            continue
        before = of_machine(hardware, field.name)
        after = of_machine(changed_machine(hardware, {field.name: Number(FACTOR, relative=True)}), field.name)
        wanted = round(before * FACTOR) if isinstance(before, int) else pytest.approx(before * FACTOR)
        assert after == wanted, field.name


def test_every_option_of_a_plan_can_be_varied():
    fields = fields_of(load_profile("a100-80"), MODEL)
    assert fields.keys() >= known_options().keys() - {"memory"}
    for name in known_options().keys() - {"memory"}:
        assert field_named(name, fields).kind == "option"
        assert "%%" not in field_named(name, fields).words
    assert field_named("mtbf", fields).parse("memory=2h,nvme=1d") == "memory=2h,nvme=1d"
    with pytest.raises(ValueError, match="mtbf=soon"):
        field_named("mtbf", fields).parse("soon")


def test_curves_are_scaled_as_a_whole():
    hardware = load_profile("h100")
    faster = changed_machine(hardware, {"host_link.down": Number(2.0, relative=True)})
    for size in (1e3, 1e6, 1e9):
        assert faster.host_link.down.time_s(size) == pytest.approx(hardware.host_link.down.time_s(size) / 2)
    assert faster.host_link.up == hardware.host_link.up
    assert faster.host_link.down.provenance.origin == "assumed"


def test_more_cores_update_faster_and_dram_stays():
    hardware = load_profile("a100-80")
    more = with_cores(hardware, 2 * hardware.host.num_cores)
    assert more.host.num_optimizer_cores == 2 * hardware.host.num_optimizer_cores
    assert number(more.host.optimizer) == pytest.approx(2 * number(hardware.host.optimizer))
    assert more.host.dram_bytes_per_s == hardware.host.dram_bytes_per_s


def test_cores_follow_what_was_measured_by_threads():
    hardware = load_profile("epyc-turin-2c")
    by_threads = hardware.host.optimizer_by_threads
    assert by_threads is not None
    assert (hardware.host.num_optimizer_cores, hardware.host.num_cores) == (1, 2)
    ratio = by_threads[2].value / by_threads[1].value
    more = with_optimizer_cores(hardware, 2)
    assert number(more.host.optimizer) == pytest.approx(number(hardware.host.optimizer) * ratio)
    assert more.host == with_cores(hardware, 4).host.model_copy(update={"num_cores": 2})


def test_drives_are_striped_and_none_is_no_nvme():
    hardware = load_profile("rtx4090-12ssd")
    twice, none = with_num_drives(hardware, 24), with_num_drives(hardware, 0)
    assert hardware.nvme is not None
    assert twice.nvme is not None
    assert twice.nvme.capacity_bytes.value == 2 * hardware.nvme.capacity_bytes.value
    assert number(twice.nvme.read) == pytest.approx(2 * number(hardware.nvme.read))
    assert none.nvme is None
    with pytest.raises(ValueError, match="such as rtx4090-12ssd"):
        with_num_drives(load_profile("v100"), 1)
    with pytest.raises(ValueError, match="at most"):
        with_devices_per_node(hardware, 2)


def test_sizes_of_the_model_change_together():
    wider = changed_model(
        MODEL, {"model.hidden_size": Number(2, relative=True), "model.head_dim": Number(2, relative=True)}
    )
    assert (wider.hidden_size, wider.head_dim) == (2 * MODEL.hidden_size, 2 * MODEL.head_dim)
    with pytest.raises(ValueError, match=r"model\.hidden_size"):
        changed_model(MODEL, {"model.hidden_size": Number(2049)})


def test_names_are_found_by_alias_and_near_ones_are_suggested():
    fields = fields_of(load_profile("a100-80"), MODEL)
    assert field_named("link.pcie.h2d_bytes_per_s", fields).name == "host_link.down"
    assert field_named("--seq-len", fields).name == field_named("seq-len", fields).name == "seq_len"
    known = {name for name in ALIASES.values() if not name.startswith(("nvme", "inter_node"))}
    assert known <= fields.keys()
    with pytest.raises(ValueError, match=r"did you mean .*host\.dram_bytes_per_s.*--fields"):
        field_named("host.dram_byte_per_s", fields)


def test_values_are_checked_by_their_field():
    fields = fields_of(load_profile("a100-80"), MODEL)
    for name, text in {
        "gpus": "0",
        "storage": "disk",
        "host.num_cores": "1.5",
        "clip": "perhaps",
        "host-dram": "3s",
    }.items():
        with pytest.raises(ValueError, match=f"{name}={text}"):
            field_named(name, fields).parse(text)
    assert field_named("clip", fields).parse("false") is False
