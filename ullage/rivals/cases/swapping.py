"""Cases of training on one consumer GPU with NVMe: a batch size, a number of drives, and the rate of computing."""

import functools
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from hwprofiles.profile import HardwareProfile
from planner.costs.model import CostModel, total_flop
from planner.decisions import Sharding
from planner.graph import Batch, build_graph, units
from planner.schedule.tasks import Tier
from planner.setup import Setup
from planner.simulate.machine import Simulation, run_until_steady
from planner.simulate.prediction import always_held, capacities, memory_peaks
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome, Strict, shortages
from ullage.rivals.cases.training import Model
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.lowering import lower

# The published data give names only. These are the layers, heads and hidden sizes that GPT-like models of such names
# usually have (GPT-3's, arXiv 2005.14165, table 2.1, and its like): assumed, as are vocabulary and length below.
MODEL_SIZES: dict[str, tuple[int, int, int]] = {
    "6b": (28, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "70b": (80, 64, 8192),
    "135b": (88, 88, 11264),
    "175b": (96, 96, 12288),
    "276b": (112, 112, 14336),
    "412b": (128, 128, 16384),
}
# The same for all of them: GPT-2's vocabulary, and the length of its sequences.
VOCAB_SIZE = 50257
SEQ_LEN = 1024


class Measured(Strict):
    """What was measured: 1e12 FLOP/s that the device computes, recomputation not counted."""

    tflops: Amount


class SwappingCase(Case):
    """A run of LoHan (Ratel) on one device.

    Attributes:
        model: one of ``MODEL_SIZES``.
        batch: sequences per iteration.
        ssds: NVMe drives that were used, out of those of the machine.
    """

    model: Annotated[str, Field(min_length=1)]
    batch: Number
    ssds: Number
    measured: Measured

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured, in SI units."""
        return {Metric.COMPUTE_RATE: self.measured.tflops * 1e12}

    def check(self) -> None:
        """Check that the model is known."""
        if self.model not in MODEL_SIZES:
            raise CaseError(
                f"case {self.id}: model is {self.model!r}, whose sizes are unknown; it may be {', '.join(MODEL_SIZES)}"
            )

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Swap as many activations as the simulator finds best, and simulate that until iterations repeat."""
        self.check_one_device(profile)
        machine = self._with_drives(profile)
        setup = self._setup()
        cost = CostModel(machine, setup.units, setup.given)
        num_on_host = _segments_on_host(setup, cost)

        @functools.cache
        def simulate(count: int) -> Simulation:
            (decisions,) = ratel(setup, (count,), num_on_host)
            return run_until_steady(lower(setup.units, decisions, asynchronous=cost.asynchronous), cost)

        def iteration_s(count: int) -> float:
            return simulate(count).period_s

        best = lowest(iteration_s, len(setup.swappable))
        (decisions,) = ratel(setup, (best,), num_on_host)
        rate = total_flop(setup.units, decisions) / iteration_s(best)
        found = simulate(best)
        warnings = (*cost.warnings, *shortages(self.id, memory_peaks(found.timeline, found.steady, cost)))
        return Outcome({Metric.COMPUTE_RATE: rate}, found.converged, warnings)

    def _with_drives(self, profile: HardwareProfile) -> HardwareProfile:
        nvme = profile.nvme
        if nvme is None or nvme.num_drives is None:
            raise CaseError(
                f"case {self.id}: {profile.name} does not say how many drives its NVMe has; add nvme.num_drives"
            )
        if self.ssds > nvme.num_drives:
            raise CaseError(
                f"case {self.id}: ssds is {self.ssds}, but {profile.name} has {nvme.num_drives}; correct it"
            )
        return profile.model_copy(update={"nvme": nvme.striped(self.ssds)})

    def _setup(self) -> Setup:
        num_layers, num_heads, hidden_size = MODEL_SIZES[self.model]
        config = Model(
            name=self.model,
            architecture="gpt2",
            num_layers=num_layers,
            hidden_size=hidden_size,
            ffn_hidden_size=4 * hidden_size,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            vocab_size=VOCAB_SIZE,
            mlp="gelu",
            norm="layernorm",
            tied_embeddings=True,
            bias=True,
            flash_attention=True,
        ).config(SEQ_LEN)
        model_units = units(build_graph(config, Batch(self.batch, SEQ_LEN)))
        # Gradients are handed to the optimizer, and state swapped, a whole unit at a time.
        largest = max(unit.num_params for unit in model_units)
        return Setup(model_units, Sharding(micro_batch=self.batch, clip=False, subgroup_params=largest))


def _segments_on_host(setup: Setup, cost: CostModel) -> int:
    """Return how many segments' activations the host has room for beside all that it always holds."""
    (decisions,) = ratel(setup, (0,))
    schedule = lower(setup.units, decisions, asynchronous=cost.asynchronous)
    room = capacities(cost)[Tier.HOST] - always_held(schedule, cost)[Tier.HOST]
    first = setup.swappable[0]
    return max(room // sum(unit.swap_bytes for unit in setup.units if unit.segment == first), 0)


def lowest(value: Callable[[int], float], last: int) -> int:
    """Return where a convex function of 0 to ``last`` is lowest, by ternary search."""
    low, high = 0, last
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if value(left) <= value(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=value)
