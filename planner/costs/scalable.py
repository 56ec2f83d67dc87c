"""Properties of a machine that can be scaled, each as one or several quantities of its profile."""

import dataclasses

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import ATTENTION_TYPES, HardwareProfile
from hwprofiles.quantity import Provenance
from planner.schedule.tasks import Tier

_SCALED = Provenance(origin="assumed", source="scaled, to see what it is worth")


@dataclasses.dataclass(frozen=True)
class Scalable:
    """A property of the machine that can be scaled.

    Attributes:
        key: its name for scripts.
        words: a short description.
        paths: quantities and curves of the profile that are scaled together; the first one gives its value.
        tier: the tier if it is a capacity; ``None`` for a rate.
    """

    key: str
    words: str
    paths: tuple[str, ...]
    tier: Tier | None = None


def all_scalables(hardware: HardwareProfile) -> tuple[Scalable, ...]:
    """Return all properties of a machine that can be scaled."""
    found = (
        Scalable("host-link", "host link, both ways", ("host_link.down", "host_link.up", "host_link.both_bytes_per_s")),
        Scalable("host-link-down", "host link down", ("host_link.down",)),
        Scalable("host-link-up", "host link up", ("host_link.up",)),
        Scalable("host-dram", "host DRAM", ("host.dram_bytes_per_s",)),
        Scalable("cpu-optimizer", "CPU optimizer", ("host.optimizer", "host.optimizer_process_params_per_s")),
        Scalable("device-gemm", "device products", ("device.gemm.bf16", "device.gemm.fp32", "device.gemm.fp8")),
        Scalable(
            "device-attention",
            "device attention",
            tuple(f"device.{name}.{kind}" for name in ("attention", "attention_backward") for kind in ATTENTION_TYPES),
        ),
        Scalable("device-elementwise", "device elementwise", ("device.elementwise", "device.elementwise_fp32")),
        Scalable("device-optimizer", "device optimizer", ("device.optimizer",)),
        Scalable("issue", "host time per kernel", ("device.issue_s",)),
        Scalable("device-memory", "device memory", ("device.memory_bytes",), Tier.GPU),
        Scalable("host-memory", "host memory", ("host.memory_bytes",), Tier.HOST),
        Scalable("intra-node", "fabric in a node", ("intra_node.bytes_per_s",)),
        Scalable("inter-node", "fabric between nodes", ("inter_node.bytes_per_s",)),
        Scalable("nvme", "NVMe, both ways", ("nvme.read", "nvme.write", "nvme.both_bytes_per_s")),
    )
    has = quantities(hardware)
    known = (
        dataclasses.replace(scalable, paths=tuple(path for path in scalable.paths if path in has)) for scalable in found
    )
    return tuple(scalable for scalable in known if scalable.paths and number(has[scalable.paths[0]]))


def scalables(hardware: HardwareProfile, dtype: str, num_devices: int, *, uses_storage: bool) -> tuple[Scalable, ...]:
    """Return the properties that can matter to training.

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
    found = (scalable for scalable in all_scalables(hardware) if matters.get(scalable.key, True))
    return tuple(_of_type(scalable, dtype) for scalable in found)


def _of_type(scalable: Scalable, dtype: str) -> Scalable:
    """Leave out curves of other types than ``dtype``, and keep products in fp8, which go beside either."""
    own = tuple(
        path for path in scalable.paths if path.endswith((f".{dtype}", f"_{dtype}", ".fp8")) or f".{dtype}-" in path
    )
    return dataclasses.replace(scalable, paths=own) if own else scalable


def scaled(hardware: HardwareProfile, scalable: Scalable, factor: float) -> HardwareProfile:
    """Return a machine with one property scaled by a factor."""
    has = quantities(hardware)
    return replace(hardware, {path: number(has[path]) * factor for path in scalable.paths}, _SCALED)
