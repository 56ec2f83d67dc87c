"""What of a machine can be turned up or down as a whole: quantities that stand for one thing, scaled together."""

import dataclasses

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from planner.schedule.tasks import Tier

_SCALED = Provenance(origin="assumed", source="scaled, to see what it is worth")


@dataclasses.dataclass(frozen=True)
class Knob:
    """A property of the machine that can be scaled.

    Attributes:
        key: its name for scripts.
        words: what it is.
        paths: quantities and curves of the profile that scale together; the first one stands for its value.
        tier: whose capacity it is; ``None``: it is a rate.
    """

    key: str
    words: str
    paths: tuple[str, ...]
    tier: Tier | None = None


def all_knobs(hardware: HardwareProfile) -> tuple[Knob, ...]:
    """Return everything that can be turned of a machine."""
    found = (
        Knob("host-link", "host link, both ways", ("host_link.down", "host_link.up", "host_link.both_bytes_per_s")),
        Knob("host-link-down", "host link down", ("host_link.down",)),
        Knob("host-link-up", "host link up", ("host_link.up",)),
        Knob("host-dram", "host DRAM", ("host.dram_bytes_per_s",)),
        Knob("cpu-optimizer", "CPU optimizer", ("host.optimizer", "host.optimizer_process_params_per_s")),
        Knob("device-gemm", "device products", ("device.gemm.bf16", "device.gemm.fp32")),
        Knob("device-attention", "device attention", ("device.attention.bf16", "device.attention.fp32")),
        Knob("device-elementwise", "device elementwise", ("device.elementwise", "device.elementwise_fp32")),
        Knob("device-optimizer", "device optimizer", ("device.optimizer",)),
        Knob("issue", "host time per kernel", ("device.issue_s",)),
        Knob("device-memory", "device memory", ("device.memory_bytes",), Tier.GPU),
        Knob("host-memory", "host memory", ("host.memory_bytes",), Tier.HOST),
        Knob("intra-node", "fabric in a node", ("intra_node.bytes_per_s",)),
        Knob("inter-node", "fabric between nodes", ("inter_node.bytes_per_s",)),
        Knob("nvme", "NVMe, both ways", ("nvme.read", "nvme.write", "nvme.both_bytes_per_s")),
    )
    has = quantities(hardware)
    known = (dataclasses.replace(knob, paths=tuple(path for path in knob.paths if path in has)) for knob in found)
    return tuple(knob for knob in known if knob.paths and number(has[knob.paths[0]]))


def knobs(hardware: HardwareProfile, dtype: str, num_devices: int, *, uses_storage: bool) -> tuple[Knob, ...]:
    """Return those that can matter to training.

    Args:
        hardware: the machine.
        dtype: type of weights and gradients.
        num_devices: devices that train.
        uses_storage: whether anything is on NVMe.
    """
    matters = {
        "intra-node": num_devices > 1,
        "inter-node": num_devices > hardware.devices_per_node,
        "nvme": uses_storage,
    }
    found = (knob for knob in all_knobs(hardware) if matters.get(knob.key, True))
    return tuple(_of_type(knob, dtype) for knob in found)


def _of_type(knob: Knob, dtype: str) -> Knob:
    """Leave out curves that training in one type does not meet."""
    own = tuple(path for path in knob.paths if path.endswith((f".{dtype}", f"_{dtype}")))
    return dataclasses.replace(knob, paths=own) if own else knob


def scaled(hardware: HardwareProfile, knob: Knob, factor: float) -> HardwareProfile:
    """Return a machine that has a factor more of something."""
    has = quantities(hardware)
    return replace(hardware, {path: number(has[path]) * factor for path in knob.paths}, _SCALED)
