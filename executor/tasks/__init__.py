"""The work of a schedule's tasks: copies, collectives, updates and snapshots."""
