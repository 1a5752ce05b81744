"""Engines that run the clients' work: one after another, or many as one batched program."""
