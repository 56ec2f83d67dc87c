"""Published engines as policies: how they would place a model, simulated beside ours."""
