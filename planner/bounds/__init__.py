"""How fast any schedule could be at best: conditions, the solver, and certificates that need no solver."""
