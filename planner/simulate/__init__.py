"""Simulation of a schedule in virtual time, with fluid sharing of resources."""

from planner.simulate.kernel import TaskTimes, simulate, solve_speeds
from planner.simulate.system import FluidSystem

__all__ = ["FluidSystem", "TaskTimes", "simulate", "solve_speeds"]
