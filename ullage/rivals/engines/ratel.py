"""LoHan (Ratel): everything on NVMe, and updates during backward."""

from collections.abc import Iterator, Sequence

from planner.decisions import Activations, Place, UnitDecision
from planner.setup import Setup
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.deciding import decide


def ratel(
    setup: Setup, counts: Sequence[int] | None = None, num_on_host: int | None = None
) -> Iterator[RivalDecisions]:
    """LoHan (Ratel): parameters and optimizer state on NVMe, updates during backward, activations swapped.

    As soon as a unit's gradient is on the host, its state is read, updated and written back, while backward goes on
    (*active gradient offloading*). One subgroup is read or written while another is updated. Some activations are
    swapped, and the rest is recomputed (arXiv 2403.06504); an iteration-time model chooses how many.

    Args:
        setup: the request; it must not clip, because updates start before all gradients are there.
        counts: numbers of segments, from the first, whose activations are swapped; by default every number is tried.
        num_on_host: swapped segments that stay on the host; the first ones go on to NVMe. By default all stay.
    """
    segments = setup.swappable
    shared = setup.tied
    streamed = decide(
        setup.changed(clip=False),
        "ratel",
        "recompute",
        lambda _: Place.NVME,
        zero_stage=3 if setup.given.data_parallel > 1 else 0,
        update_start="backward",
        update_order="backward",
        pinned_reads=False,
    )
    for count in range(len(segments) + 1) if counts is None else counts:
        on_nvme = count - min(count, len(segments) if num_on_host is None else num_on_host)
        where: dict[str, Activations] = dict.fromkeys(segments[:count], "offload")
        where |= dict.fromkeys(segments[:on_nvme], "offload-nvme")
        units = {
            unit.name: UnitDecision(
                params="nvme" if unit.num_weights and unit.name not in shared else "gpu",
                activations=where.get(unit.segment, streamed.units[unit.name].activations),
                update=streamed.units[unit.name].update,
            )
            for unit in setup.units
        }
        yield streamed.model_copy(update={"units": units})
