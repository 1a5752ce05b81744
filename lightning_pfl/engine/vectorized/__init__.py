"""Many clients as one batched program."""
