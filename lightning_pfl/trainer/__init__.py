"""The federation inside Lightning's Trainer: strategy, loops, checkpoints, flags."""
