"""Run the points of a study in processes or on Ray, with a store of results."""
