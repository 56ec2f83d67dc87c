"""Models shared by ranks: which part of every parameter a rank has, and what its modules exchange with the others'."""
