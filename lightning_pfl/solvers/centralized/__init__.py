"""Solvers that see all clients' losses at once, to compare methods with."""
