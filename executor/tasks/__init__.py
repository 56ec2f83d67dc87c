"""What the tasks of a schedule do: copies, collectives, updates and snapshots."""
