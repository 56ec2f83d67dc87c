"""Simulation of a schedule in virtual time, with fluid sharing of resources."""

from planner.simulate.kernel import simulate
from planner.simulate.system import FluidSystem

__all__ = ["FluidSystem", "simulate"]
