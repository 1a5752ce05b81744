"""Results of finished runs, to be compared."""

from lightning_pfl.results.clients import read_clients
from lightning_pfl.results.comparison import Comparison, compare

__all__ = ["compare", "Comparison", "read_clients"]
