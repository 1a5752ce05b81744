"""Workloads and baselines, timed in one run."""
