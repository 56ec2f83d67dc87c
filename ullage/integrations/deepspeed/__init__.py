"""Configurations of DeepSpeed: compare one with a plan, and write the one nearest to a plan."""
