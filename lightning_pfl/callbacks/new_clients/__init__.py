"""Adaptation to clients that never took part."""
