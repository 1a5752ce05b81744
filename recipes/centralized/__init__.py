"""Solvers of convex clustering that see the data of all clients, to compare a federation with."""
