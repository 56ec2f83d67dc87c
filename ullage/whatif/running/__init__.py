"""Run the points of a study in processes, with a store of results."""
