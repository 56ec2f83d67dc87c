"""Simulation of a schedule in virtual time, with fluid sharing of resources."""
