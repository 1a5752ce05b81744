"""Checks of whether a step may run for many clients at once."""
