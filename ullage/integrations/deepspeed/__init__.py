"""DeepSpeed's JSON: what a configuration does beside a plan of ours, and the nearest configuration to a plan."""
