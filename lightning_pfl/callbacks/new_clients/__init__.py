"""Clients that never took part."""
