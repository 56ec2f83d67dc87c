"""Simulate a plan's model and machine under other decisions, in the same way as the plan's own."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from hwprofiles.profile import HardwareProfile
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, UnitDecision
from planner.graph import Unit
from planner.lowering import lower
from planner.plan.document import Plan
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane
from planner.search.scoring import Candidate, Lower, candidate_of
from planner.setup import Setup
from planner.simulate.critical_path import critical_path
from planner.simulate.machine import Simulation, run_until_steady
from planner.simulate.prediction import memory_peaks


class Bench:
    """A plan's model and machine, on which other decisions can be tried.

    Args:
        plan: the plan.
        lower: lowers what is tried.

    Attributes:
        units: the model's units, by name, in forward order.
        cost: prices on the plan's machine.
        simulation: of the plan's own schedule.
        own: the plan's own decisions, scored.
        memory: their peaks and capacities, of one device and of one host.
    """

    def __init__(self, plan: Plan, lower: Lower = lower) -> None:
        self.plan, self._lower = plan, lower
        self.decisions = plan.decisions
        members = plan.units()
        self.units: dict[str, Unit] = {unit.name: unit for unit in members}
        self.cost = CostModel.of(plan.hardware, members, plan.decisions)
        self.schedule = plan.schedule()
        self.simulation = run_until_steady(self.schedule, self.cost)
        self.own = candidate_of(self.decisions, self.simulation, self.cost)
        self.memory = memory_peaks(self.simulation.timeline, self.simulation.steady, self.cost)
        setup = Setup(members)
        self._tied, self._swappable = setup.tied, set(setup.swappable)

    def lower(self, decisions: Decisions) -> Schedule:
        """Return the schedule of other decisions.

        Raises:
            ValueError: they do not fit the units.
        """
        return self._lower(self._members(decisions), decisions, asynchronous=self.cost.asynchronous)

    def trial(self, decisions: Decisions) -> Candidate:
        """Simulate other decisions until iterations repeat."""
        cost = self._priced(decisions)
        return candidate_of(decisions, run_until_steady(self.lower(decisions), cost), cost)

    def _priced(self, decisions: Decisions) -> CostModel:
        """Return prices for decisions; in a pipeline, the units are stages, which depend on decisions."""
        is_of = operator.attrgetter("tiles", "kernels", "optimizer", "precision", "context_exchange")
        if decisions.pipeline_parallel == 1 and is_of(decisions) == is_of(self.decisions):
            return self.cost
        return CostModel.of(self.plan.hardware, self._members(decisions), decisions)

    def _members(self, decisions: Decisions) -> tuple[Unit, ...]:
        is_of = operator.attrgetter("tiles", "kernels", "precision", "pipeline_order", "context_exchange")
        if is_of(decisions) == is_of(self.decisions):
            return tuple(self.units.values())
        return self.plan.units(decisions)

    def on(self, hardware: HardwareProfile) -> tuple[float, Lane]:
        """Simulate the plan's own schedule on another machine.

        Returns:
            Seconds per iteration, and the lane that bounds it: the one with the largest share of the critical path.
        """
        cost = CostModel.of(hardware, tuple(self.units.values()), self.decisions)
        simulation = run_until_steady(self.schedule, cost)
        return simulation.period_s, bounding_lane(simulation)

    # -- changing decisions ---------------------------------------------------------------------------------------

    def with_units(self, units: Mapping[str, UnitDecision]) -> Decisions:
        """Return the plan's decisions with others for some units."""
        return changed(self.decisions, units=self.decisions.units | dict(units))

    def with_each(self, names: Iterable[str], **update: Any) -> Decisions:
        """Return the plan's decisions with the same change to each of some units."""
        return self.with_units({name: self.decisions.units[name].model_copy(update=update) for name in names})

    def pieces(self, *places: Place) -> list[tuple[str, int]]:
        """Return unit and number of subgroups that are updated at ``places`` (default: any), in forward order."""
        return [
            (name, piece)
            for name in self.units
            for piece, place in enumerate(self.decisions.units[name].update)
            if place in (places or Place)
        ]

    def placed(self, places: Mapping[tuple[str, int], Place]) -> Decisions:
        """Return the plan's decisions with other places for some subgroups, by unit and number.

        Units that are now updated on the device keep their parameters there. Only units that are updated from NVMe may
        have their parameters on NVMe.
        """
        units = {}
        for name, old in self.decisions.units.items():
            update = tuple(places.get((name, piece), before) for piece, before in enumerate(old.update))
            params = "host" if old.params == "nvme" and set(update) != {Place.NVME} else old.params
            params = "gpu" if Place.GPU in update else params
            units[name] = old.model_copy(update={"update": update, "params": params})
        return self.with_units(units)

    def fetchable(self, unit: str) -> bool:
        """Return whether a unit's parameters may live on the host."""
        sharded_state = self.decisions.regathers(self.units[unit])
        alone = self.decisions.pipeline_parallel == 1
        return bool(self.units[unit].num_weights) and unit not in self._tied and alone and not sharded_state

    def recomputable(self, unit: str) -> bool:
        """Return whether a unit's segment can be recomputed."""
        return self.units[unit].segment in self._swappable


def changed(decisions: Decisions, **options: Any) -> Decisions:
    """Return decisions with other options, checked.

    Raises:
        ValueError: they contradict one another.
    """
    return Decisions.model_validate(dict(decisions) | options)


def bounding_lane(simulation: Simulation) -> Lane:
    """Return the lane with the largest share of the critical path of a steady iteration."""
    return Lane(next(iter(critical_path(simulation.timeline, simulation.steady))))
