"""Rows of the comparison: an engine, and the settings of it that are tried, of which the best is kept."""

import dataclasses
from typing import Any, Literal

Kind = Literal["ours", "peer", "ceiling", "other mathematics"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: of the row.
        engine: see :data:`benchmarks.peers.engines.ENGINES`.
        candidates: settings to try, the likeliest first.
        kind: ``peer`` rows compete for the best; ``ceiling`` is no offloading; what trains with other mathematics is
            shown, but competes with nobody.
        devices: kinds of device it is tried on.
    """

    name: str
    engine: str
    candidates: tuple[dict[str, Any], ...] = ({},)
    kind: Kind = "peer"
    devices: tuple[str, ...] = ("cpu", "cuda")

    def candidates_for(self, *, recompute: bool, quick: bool) -> tuple[dict[str, Any], ...]:
        """Return the settings to try, all with recomputation or none; with ``quick`` the likeliest alone."""
        added = {"recompute": True} if recompute else {}
        return tuple(candidate | added for candidate in self.candidates[: 1 if quick else None])


# Small models have few subgroups of 1e8 parameters: on a CPU Twin-Flow needs smaller ones to have something to split.
_TWIN_FLOW = tuple({"ratio": ratio, "sub_group_size": size} for size in (2 * 10**7, 10**8) for ratio in (0.5, 0.8, 0.3))
ROWS: tuple[Row, ...] = (
    Row("ours", "ours", kind="ours"),
    Row("in-memory", "in_memory", kind="ceiling"),
    Row(
        "zero-2-offload",
        "zero2",
        ({}, {"overlap_comm": False}, {"bucket_size": 10**8}),
    ),
    Row(
        "zero-3-offload",
        "zero3",
        ({}, {"sub_group_size": 4 * 10**8}, {"overlap_comm": False}, {"sub_group_size": 10**9}),
    ),
    Row("twin-flow", "zero3", _TWIN_FLOW[:3], devices=("cpu",)),
    Row("twin-flow", "zero3", _TWIN_FLOW[3:], devices=("cuda",)),
    Row("super-offload", "zero3", ({"super_offload": True}, {"super_offload": True, "sub_group_size": 4 * 10**8})),
    Row("fsdp2", "fsdp2", ({}, {"reshard": False}, {"fused": False})),
    Row("torchao", "torchao", ({}, {"offload_gradients": True})),
    Row(
        "zenflow",
        "zenflow",
        ({"zenflow": {"topk_ratio": 0.1, "update_interval": 4, "select_interval": 1000, "select_strategy": "step"}},),
        kind="other mathematics",
        devices=("cuda",),
    ),
)


def rows_for(device: str, names: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Return the rows of a kind of device, or those of them that are named.

    Raises:
        ValueError: a name is not among them.
    """
    rows = {row.name: row for row in ROWS if device in row.devices}
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"{unknown[0]!r} is no row on {device}; choose from {', '.join(rows)}")
    return tuple(rows[name] for name in names or rows)
