"""Passes with which schedules of other engines are lowered, where ours do not do."""
