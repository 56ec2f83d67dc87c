"""Rows of the comparison: an engine, and the settings of it that are tried, of which the best is kept."""

import dataclasses
from typing import Any, Literal

from benchmarks.peers.jobs import Cell

Rounding = Literal["nearest", "stochastic"]
Kind = Literal["ours", "peer", "ceiling", "other mathematics"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: of the row.
        engine: see :data:`benchmarks.peers.engines.ENGINES`.
        kind: ``peer`` rows compete for the best; ``ceiling`` is no offloading; what trains with other mathematics is
            shown, but competes with nobody.
        gradients: their type as they wait for the update: that of the ``state`` or of ``weights``; ``None``: unknown.
        states: types of master copy and moments that it can train with; see :attr:`Cell.state`.
        cpu, cuda: settings to try on that kind of device, the likeliest first; none: it is not tried unless named.
    """

    name: str
    engine: str
    kind: Kind = "peer"
    gradients: Literal["state", "weights"] | None = "state"
    states: tuple[str, ...] = ("fp32",)
    cpu: tuple[dict[str, Any], ...] = ({},)
    cuda: tuple[dict[str, Any], ...] = ({},)

    def state(self, cell: Cell) -> dict[str, Any]:
        """Return the types that it keeps in a cell, and whether gradients are clipped."""
        gradients = {"state": cell.state, "weights": cell.dtype, None: None}[self.gradients]
        return {"master": cell.state, "moments": cell.state, "gradients": gradients, "clipping": cell.max_norm > 0}

    def rounding(self, cell: Cell) -> Rounding:
        """Return how weights are rounded after an update: ours in bf16 stochastically, so they train differently."""
        return "stochastic" if self.kind == "ours" and cell.state == "bf16" else "nearest"

    def candidates(self, device: str, *, recompute: bool, most: int | None) -> tuple[dict[str, Any], ...]:
        """Return the settings to try, all with recomputation or none, at most so many."""
        added = {"recompute": True} if recompute else {}
        found = (self.cpu if device == "cpu" else self.cuda) or self.cpu or self.cuda
        return tuple(candidate | added for candidate in found[:most])


_ONE_THREAD = {"step_threads": 1}  # no team of threads to start and to wait for in every kernel of the step
_SPIN = {"spin": True}
_ZENFLOW = {"topk_ratio": 0.1, "update_interval": 4, "select_interval": 1000, "select_strategy": "step"}
_SMALLER = 2 * 10**7  # subgroups of 1e8 would leave a small model in one piece, and Twin-Flow nothing to split
_LARGER = 4 * 10**8
_BOTH = ("fp32", "bf16")
ROWS: tuple[Row, ...] = (
    Row("ours", "ours", "ours", "weights", _BOTH),
    Row("in-memory", "in_memory", "ceiling", "weights", _BOTH, cpu=({}, _ONE_THREAD, _SPIN)),
    Row(
        "zero-2-offload",
        "zero2",
        states=_BOTH,
        cpu=({}, {"overlap_comm": False}, _ONE_THREAD, _SPIN),
        cuda=({}, {"overlap_comm": False}, {"bucket_size": 10**8}),
    ),
    Row(
        "zero-3-offload",
        "zero3",
        states=_BOTH,
        cpu=({}, _ONE_THREAD, _SPIN),
        cuda=({"sub_group_size": _LARGER}, {}, {"overlap_comm": False}, {"sub_group_size": 10**9}),
    ),
    # Parameters on the host too, and fetched: slower where weights fit the device, and all there is where they do not.
    Row(
        "zero-3-params",
        "zero3",
        states=_BOTH,
        cpu=(),
        cuda=(
            {"offload_param": True},
            {"offload_param": True, "sub_group_size": _LARGER},
            {"offload_param": True, "overlap_comm": False},
        ),
    ),
    Row(
        "twin-flow",
        "zero3",
        cpu=tuple({"ratio": ratio, "sub_group_size": _SMALLER} for ratio in (0.5, 0.8)),
        cuda=tuple({"ratio": ratio} for ratio in (0.5, 0.8, 0.3, 0.6)),
    ),
    Row(
        "super-offload",
        "zero3",
        cpu=({"super_offload": True},),
        cuda=({"super_offload": True}, {"super_offload": True, "sub_group_size": _LARGER}),
    ),
    Row(
        "fsdp2",
        "fsdp2",
        states=_BOTH,
        cpu=({}, {"reshard": False}, _ONE_THREAD, _SPIN),
        cuda=({}, {"reshard": False}, {"fused": False}),
    ),
    Row("torchao", "torchao", states=_BOTH, cuda=({}, {"offload_gradients": True})),
    Row(
        "zenflow",
        "zenflow",
        "other mathematics",
        None,
        cpu=(),
        cuda=({"zenflow": _ZENFLOW}, {"zenflow": _ZENFLOW | {"overlap_step": True}}),
    ),
)


def rows_for(device: str, names: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Return the rows of a kind of device, or those that are named.

    Raises:
        ValueError: there is no row of a name.
    """
    rows = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"there is no row {unknown[0]!r}; choose from {', '.join(rows)}")
    return tuple(row for row in ROWS if (row.name in names if names else getattr(row, device)))
