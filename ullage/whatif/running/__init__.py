"""Running the points of a study: in processes or on Ray, with a store of what came out."""
