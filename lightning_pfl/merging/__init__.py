"""One model from those of finished clients, which had exchanged nothing."""

from lightning_pfl.merging.matched import matched
from lightning_pfl.merging.predictive import BetaPredictive, BetaPredictiveRegression

__all__ = ["matched", "BetaPredictive", "BetaPredictiveRegression"]
