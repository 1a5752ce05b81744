"""Federated training inside Lightning's Trainer: strategy, loops, checkpoints and checks."""
