"""Other engines, simulated beside Ullage, and published runs with which the simulator is compared.

The planner knows nothing of them: what an engine decides, and where its schedule differs from ours, is all here.
"""

from ullage.rivals.rows import engine_rows, engines_beside, make_plan

__all__ = ["engine_rows", "engines_beside", "make_plan"]
