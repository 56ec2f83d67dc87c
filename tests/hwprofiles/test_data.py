from importlib.resources import files

import pytest
from pydantic import BaseModel

from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve, Quantity
from hwprofiles.registry import canonical_json, list_profiles, load_profile

TYPICAL = {
    "v100",
    "a100-40",
    "a100-80",
    "a800-80",
    "h100",
    "h200",
    "gh200",
    "b200",
    "b300",
    "gb200",
    "gb10",
    "mi300x",
    "rtx-3090",
    "rtx-4090",
    "rtx-4090x8",
    "rtx-5090",
    "rtx-5060-ti",
    "rtx-a6000",
    "rtx-pro-6000",
    "l40s",
}
PUBLISHED = {
    "h100x4-80g",
    "a100x4-40g",
    "polaris-a100-40g",
    "h100x4-56core-nvme",
    "rtx4090-12ssd",
    "a100x8-nvlink",
    "a100-cluster",
    "h100-80g-dataflow",
    "b200x8-nvlink",
}
CALIBRATED = {"epyc-turin-2c", "h200x1-16c"}
GB, TERA = 1e9, 1e12

every = pytest.mark.parametrize("name", sorted(TYPICAL | PUBLISHED))


def rate(curve):
    return curve.best_rate_per_s()


def values(node, path=""):
    """Yield (path, value) of every quantity and curve below a profile."""
    if isinstance(node, (Quantity, Curve)):
        yield path, node
    elif isinstance(node, BaseModel):
        for field in type(node).model_fields:
            yield from values(getattr(node, field), f"{path}.{field}")
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from values(value, f"{path}.{key}")


def test_every_machine_is_there():
    assert set(list_profiles()) - {"local"} == TYPICAL | PUBLISHED | CALIBRATED


@every
def test_a_file_is_named_after_its_profile_and_canonical(name):
    profile = load_profile(name)
    assert profile.name == name
    assert (files("hwprofiles") / "data" / f"{name}.json").read_text() == canonical_json(profile)


@every
def test_every_value_has_the_unit_of_its_name_and_a_source(name):
    units = (
        ("_bytes_per_s", "bytes_per_s"),
        ("_params_per_s", "params_per_s"),
        (".bytes_per_s", "bytes_per_s"),
        ("_bytes", "bytes"),
        ("_s", "s"),
        ("num_cores_per_copy", "count"),
        ("gemm_rows_half", "count"),
        ("_ratio", "ratio"),
    )
    profile = load_profile(name)
    found = list(values(profile))
    assert len(found) > (20 if profile.nvme or profile.intra_node else 19)  # a device and its host alone: 20 values
    for path, value in found:
        assert len(value.provenance.source) > 10, path
        assert "http" not in value.provenance.source, path
        assert value.provenance.origin != "measured", path
        if isinstance(value, Quantity):
            assert value.unit == next(unit for ending, unit in units if path.endswith(ending)), path


def test_the_schema_declares_the_unit_of_every_field():
    """A bare ``Quantity`` or ``Curve`` would let a value in a wrong unit pass."""

    def annotations(model, seen):
        for name, field in model.model_fields.items():
            yield f"{model.__name__}.{name}", field
            for inner in getattr(field.annotation, "__args__", (field.annotation,)):
                if isinstance(inner, type) and issubclass(inner, BaseModel) and inner not in seen:
                    seen.add(inner)
                    yield from annotations(inner, seen)

    checked = 0
    for name, field in annotations(HardwareProfile, {Quantity, Curve}):
        text = repr(field)
        if "Quantity" in text or "Curve" in text:
            checked += 1
            assert "AfterValidator" in text, name
    assert checked >= 22


@every
def test_rates_are_ordered_as_physics_orders_them(name):
    profile = load_profile(name)
    device, host, link = profile.device, profile.host, profile.host_link
    down, up = rate(link.down), rate(link.up)
    assert link.pageable_rate("up") <= up
    assert link.pageable_rate("down") <= down
    assert max(down, up) < link.both_bytes_per_s.value <= down + up
    assert max(down, up) < host.dram_bytes_per_s.value < device.memory_bytes_per_s.value
    if host.dram_bytes_per_s.provenance.origin != "fitted":  # else memory binds, whatever cores could do
        assert host.elementwise_bytes_per_s.value <= host.dram_bytes_per_s.value
        assert 28 * rate(host.optimizer) <= host.dram_bytes_per_s.value
    assert 28 * rate(device.optimizer) <= device.memory_bytes_per_s.value * 1.01
    assert rate(host.optimizer) < rate(device.optimizer)
    assert rate(device.elementwise) <= device.memory_bytes_per_s.value
    assert rate(device.gemm["fp32"]) < rate(device.gemm["bf16"])
    for dtype in ("bf16", "fp32"):
        if device.gemm[dtype].provenance.origin == "fitted":  # to whole runs, with all that keeps a device waiting
            continue
        # Products at the power limit are hardly faster than attention, nor are those of GeForce cards, which add up in
        # fp32 at half rate: there the rate of attention is published.
        is_published = device.attention[dtype].provenance.origin == "published"
        most = 0.9 if device.gemm_bytes_per_s or is_published else 0.71
        assert 0.3 < rate(device.attention[dtype]) / rate(device.gemm[dtype]) < most
    assert (profile.one_memory is True) == (name == "gb10")
    assert (device.memory_bytes.value < host.memory_bytes.value) == (profile.one_memory is None)
    if profile.nvme is not None:
        assert rate(profile.nvme.write) <= rate(profile.nvme.read) < host.dram_bytes_per_s.value
    if profile.intra_node is not None:
        assert profile.intra_node.via_host_link == (profile.intra_node.bytes_per_s.value < down)
        if profile.inter_node is not None:
            assert profile.inter_node.bytes_per_s.value < profile.intra_node.bytes_per_s.value


@every
def test_curves_cover_the_sizes_that_plans_ask_for(name):
    profile = load_profile(name)
    for curve, size in (
        (profile.device.gemm["bf16"], 1e12),
        (profile.device.elementwise, 1e8),
        (profile.device.optimizer, 1e8),
        (profile.host_link.down, 2e8),
        (profile.host_link.up, 2e8),
    ):
        assert curve.points[0].size <= size <= curve.points[-1].size


@pytest.mark.parametrize(
    ("read", "wanted"),
    [
        (lambda: rate(load_profile("h100").host_link.down), 55.2 * GB),
        (lambda: rate(load_profile("h200").host_link.up), 55.2 * GB),
        (lambda: rate(load_profile("a100-80").host_link.down), 25 * GB),
        (lambda: rate(load_profile("v100").host_link.down), 12 * GB),
        (lambda: load_profile("a100-40").host_link.both_bytes_per_s.value, 38 * GB),
        (lambda: 1.17 * rate(load_profile("a100-40").device.gemm["bf16"]), 271 * TERA),
        (lambda: 1.17 * rate(load_profile("b300").device.gemm["bf16"]), 1800 * TERA),
        (lambda: load_profile("a800-80").intra_node.bytes_per_s.value, 235 * GB * 400 / 600),
        (lambda: rate(load_profile("gh200").device.gemm["bf16"]), 829 * TERA),
        (lambda: rate(load_profile("rtx-4090").device.gemm["bf16"]), 156 * TERA),
        (lambda: rate(load_profile("gh200").host_link.down), 375 * GB),
        (lambda: rate(load_profile("gh200").host_link.up), 297 * GB),
        (lambda: load_profile("gh200").host.dram_bytes_per_s.value, 486 * GB),
        (lambda: load_profile("v100").host.optimizer.time_s(4e9), 1.03),
        (lambda: rate(load_profile("polaris-a100-40g").host.optimizer), 3.0 * GB),
        (lambda: rate(load_profile("polaris-a100-40g").nvme.write), 2 * GB),
        (lambda: rate(load_profile("h100").nvme.read), 48 * GB),
        (lambda: load_profile("a100x8-nvlink").intra_node.bytes_per_s.value, 235 * GB),
    ],
)
def test_published_facts(read, wanted):
    assert read() == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_a_device_that_always_computes_is_slower_than_at_its_best(name):
    """All of its rates, by as much as long runs of this chip are: at the power limit, clocks fall."""
    device, fitted = load_profile(name).device, load_profile("h100-80g-dataflow").device
    assert rate(device.gemm["bf16"]) == pytest.approx(rate(fitted.gemm["bf16"]), rel=1e-4)
    assert rate(device.gemm["bf16"]) * 1.171 == pytest.approx(794 * TERA, rel=0.001)
    assert rate(device.attention["bf16"]) == pytest.approx(0.6 * rate(device.gemm["bf16"]), rel=0.01)
    assert rate(device.gemm["fp8"]) * 1.171 == pytest.approx({"h100": 1402.6, "h200": 1453.4}[name] * TERA, rel=0.001)


def test_what_was_fitted_stays_below_what_is_published():
    cluster = load_profile("a100-cluster")
    assert cluster.inter_node.bytes_per_s.provenance.origin == "fitted"
    assert cluster.inter_node.bytes_per_s.value < 800 / 8 / 8 * GB  # 800 Gbit/s per server of 8
    assert rate(cluster.device.elementwise) < 2039 * GB  # datasheet


@pytest.mark.parametrize(
    ("name", "devices", "sharing"),
    [("v100", 16, 4), ("a100-80", 8, 2), ("h100", 8, 1), ("polaris-a100-40g", 4, 1), ("rtx-4090", 1, 1)],
)
def test_devices_that_share_an_uplink(name, devices, sharing):
    profile = load_profile(name)
    assert profile.devices_per_node == devices
    assert profile.devices_per_uplink() == sharing


@pytest.mark.parametrize(
    ("name", "num_params", "update_s"),
    [
        ("h100x4-80g", 15326663680, 2.272),
        ("a100x4-40g", 5948837888, 1.993),
        ("polaris-a100-40g", 5948837888, 3.039),
    ],
)
def test_fitted_memory_rates_explain_the_update_phases_they_were_fitted_to(name, num_params, update_s):
    """Scaling (8 B/param) and CPU Adam (28), then an unpinned upload (2 B/param) that casts, one after another."""
    profile = load_profile(name)
    memory_bytes_per_s = profile.host.dram_bytes_per_s.value
    # A staged copy passes memory four times, and the ranks of a node share it.
    upload_bytes_per_s = min(profile.devices_per_node * profile.host_link.pageable_rate("down"), memory_bytes_per_s / 4)
    seconds = num_params * ((8 + 28) / memory_bytes_per_s + 2 / upload_bytes_per_s)
    assert seconds == pytest.approx(update_s, rel=0.08)
