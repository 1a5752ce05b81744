"""Results of finished runs, to be compared."""

from lightning_pfl.compare.clients import read_clients

__all__ = ["read_clients"]
