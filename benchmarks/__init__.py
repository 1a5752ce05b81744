"""Workloads with their baselines, timed side by side in one run."""
