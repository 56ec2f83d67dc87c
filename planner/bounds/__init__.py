"""Lower bounds on the iteration time of any schedule: conditions, solver, certificates and their checker."""
