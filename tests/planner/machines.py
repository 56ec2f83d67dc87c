"""A machine whose every number is round, so that prices can be calculated by hand."""

from hwprofiles.profile import Device, Fabric, HardwareProfile, Host, Link, Storage
from hwprofiles.quantity import Curve, CurvePoint, Provenance, Quantity, SizeUnit, Unit

ASSUMED = Provenance(origin="assumed", source="round numbers for tests")


def quantity(value: float, unit: Unit) -> Quantity:
    return Quantity(value=value, unit=unit, provenance=ASSUMED)


def rate(per_s: float, size_unit: SizeUnit, largest: float = 1e15) -> Curve:
    """Return a curve of constant rate, measured from size 1 to the largest."""
    points = (
        CurvePoint(size=size, p10_s=size / per_s, median_s=size / per_s, p90_s=size / per_s) for size in (1, largest)
    )
    return Curve(size_unit=size_unit, points=tuple(points), provenance=ASSUMED)


def machine(
    *,
    kind: str = "gpu",
    devices_per_node: int = 1,
    gpu_bytes: float = 1e12,
    host_bytes: float = 1e13,
    cpu_params_per_s: float = 1e9,
    gpu_params_per_s: float = 1e10,
    num_cores_per_copy: float = 0,
    rows_half: float = 0,
    via_host_link: bool = False,
    inter_node: bool = True,
    nvme_bytes: float = 1e15,
    nvme_both: float | None = None,
    nvme_drives: int | None = 4,
    flop_per_s: float = 1e14,
    fp8_flop_per_s: float | None = None,
    issue_s: float = 1e-5,
) -> HardwareProfile:
    """Return a machine: 1e14 FLOP/s, links of 2e10 B/s (3e10 both ways), DRAM of 1e11 B/s, 8 cores (4 update).

    Its NVMe has 4 drives, which read 8e9 and write 4e9 B/s.
    """
    speed = {"bf16": rate(flop_per_s, "flop"), "fp32": rate(flop_per_s / 2, "flop")}
    device = Device(
        name="round",
        kind=kind,  # type: ignore[arg-type]
        memory_bytes=quantity(gpu_bytes, "bytes"),
        memory_bytes_per_s=quantity(1e12 if kind == "gpu" else 2.5e10, "bytes_per_s"),
        num_cores=0 if kind == "gpu" else 2,
        gemm=speed | ({"fp8": rate(fp8_flop_per_s, "flop")} if fp8_flop_per_s else {}),  # type: ignore[arg-type]
        gemm_rows_half=quantity(rows_half, "count"),
        attention=speed,  # type: ignore[arg-type]
        elementwise=rate(1e12, "bytes"),
        optimizer=rate(gpu_params_per_s, "params"),
        issue_s=quantity(issue_s if kind == "gpu" else 0.0, "s"),
    )
    host = Host(
        name="round",
        memory_bytes=quantity(host_bytes, "bytes"),
        dram_bytes_per_s=quantity(1e11, "bytes_per_s"),
        num_cores=8,
        optimizer=rate(cpu_params_per_s, "params"),
        num_optimizer_cores=4,
        elementwise_bytes_per_s=quantity(5e10, "bytes_per_s"),
    )
    link = Link(
        down=rate(2e10, "bytes"),
        up=rate(2e10, "bytes"),
        both_bytes_per_s=quantity(3e10, "bytes_per_s"),
        pageable_bytes_per_s=quantity(5e9, "bytes_per_s"),
        pageable_down_bytes_per_s=quantity(4e9, "bytes_per_s"),
        num_cores_per_copy=quantity(num_cores_per_copy, "count"),
    )
    intra = Fabric(
        bytes_per_s=quantity(1e11, "bytes_per_s"), latency_s=quantity(1e-5, "s"), via_host_link=via_host_link
    )
    nvme = nvme_bytes and Storage(
        capacity_bytes=quantity(nvme_bytes, "bytes"),
        read=rate(8e9, "bytes"),
        write=rate(4e9, "bytes"),
        num_drives=nvme_drives,
        both_bytes_per_s=quantity(nvme_both, "bytes_per_s") if nvme_both else None,
    )
    inter = Fabric(bytes_per_s=quantity(1e10, "bytes_per_s"), latency_s=quantity(2e-5, "s"))
    return HardwareProfile(
        name="round",
        description="round numbers",
        device=device,
        devices_per_node=devices_per_node,
        host=host,
        host_link=link,
        nvme=nvme or None,
        intra_node=intra if devices_per_node > 1 else None,
        inter_node=inter if inter_node else None,
        topology=tuple((f"{kind}{i}", "dram") for i in range(devices_per_node)),
    )
