"""RoundLog: what a round logs, and the warnings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pfl.contract.records import LocalResult, Round
from lightning_pfl.core.tree import Tree, nbytes
from lightning_pfl.federation.gate import Verdict
from lightning_pfl.federation.state import FederationState

GROWTH = 1e3
"""How many times its first values, or 1, the loss of most clients is in a run that diverges."""


class RoundLog:
    """The values that a round logs, and what was warned of so far.

    Attributes:
        values: What the current round logs, by name; kept for a run that is resumed inside the
            round.
        prog_bar: Names of those that the progress bar shows.
        logger: Names of those that loggers get.
        bytes_total: Bytes that all clients have received and sent in the rounds so far.
        first_loss: The largest training loss of a client in the first round that has one.
    """

    def __init__(self) -> None:
        self.values: Mapping[str, float] = MappingProxyType({})
        self.prog_bar: tuple[str, ...] = ()
        self.logger: tuple[str, ...] = ()
        self.bytes_total = 0.0
        self.first_loss: float | None = None
        self._warned: frozenset[str] = frozenset()

    # --- in the order of a round ------------------------------------------------------------------

    def record(
        self, federation: FederationState, round: Round, result: LocalResult, verdict: Verdict
    ) -> None:
        """Log means of the user's values over accepted clients, and traffic; warn of clients.

        Args:
            federation: The federation, before the server's update.
            round: The round; its metrics and its bytes to and from one client are set.
            result: What all clients of the cohort returned.
            verdict: Which of their uploads count.
        """
        cohort, names = len(round.info), list(result.logs)
        method, server = federation.method, federation.server
        down = _total(method.download_nbytes(server, round.info), round.received or {}, cohort)
        up = _total(method.upload_nbytes(result.uploads, round.info), result.uploads, cohort)
        round.bytes_down, round.bytes_up = down // max(cohort, 1), up // max(cohort, 1)
        round.metrics, losses = _means(result, verdict.accepted)
        self.values = {
            **round.metrics,
            "round/clients": float(cohort),
            "round/rejected": float(len(round.rejected)),
            "round/bytes_down": float(down),
            "round/bytes_up": float(up),
        }
        self.prog_bar = tuple(name for name in names if result.options[name].prog_bar)
        silent = {name for name in names if not result.options[name].logger}
        self.logger = tuple(name for name in self.values if name not in silent)
        self._warn_of_clients(federation, round, verdict)
        self._warn_of_growth(federation, round, losses)
        training = int(round.info.steps.sum()) and nbytes(result.uploads)
        if training and not verdict.norms.any() and result.loss.isnan().all():
            self.warn(
                {
                    "no loss": f"No client has changed anything in round {round.number}, and none "
                    "has computed a loss. Return the loss from `training_step`."
                }
            )

    def _warn_of_clients(self, federation: FederationState, round: Round, verdict: Verdict) -> None:
        """Warn of clients that were left out, and of those that come near to it."""
        cohort = len(round.info)
        if round.rejected:
            rank_zero_warn(
                f"Round {round.number} left out {len(round.rejected)} of {cohort} clients "
                f"({_listed(federation, round.rejected)}). They keep their "
                f"states{'; the server is unchanged' if len(round.rejected) == cohort else ''}. "
                "Look for NaN and other units in their data, or use a smaller learning rate."
            )
        new = [k for k in verdict.outliers if f"outlier {k}" not in self._warned]
        self._warned |= {f"outlier {k}" for k in new}
        if new:
            rank_zero_warn(
                f"Round {round.number} has clients with far too large updates: "
                f"{_listed(federation, {k: verdict.outliers[k] for k in new})}. Look at their "
                "data, or set max_update_norm='auto' to leave such clients out."
            )

    def _warn_of_growth(self, federation: FederationState, round: Round, losses: Tensor) -> None:
        """Warn, once, of losses that grow for most clients although all of them are finite.

        Few clients may have larger losses for good, and a loss below 1 may grow to it.
        """
        found = losses[losses.isfinite()]
        if not len(found):
            return
        if self.first_loss is None:
            self.first_loss = float(found.max())
            return
        usual, median = max(self.first_loss, 1.0), float(found.median())
        if median <= GROWTH * usual:
            return
        order = losses.nan_to_num(-torch.inf, -torch.inf, -torch.inf).argsort(descending=True)
        largest = {
            int(round.info.index[at]): f"{float(losses[at]):.3g}"
            for at in order[: len(found)].tolist()
        }
        self.warn(
            {
                "growth": f"Round {round.number} diverges: the training loss of the median client "
                f"is {median:.3g}, where that of the first round was {self.first_loss:.3g} at most "
                f"({_listed(federation, largest)}). Use a smaller learning rate or "
                "`gradient_clip_val`, or scale the inputs and targets."
            }
        )

    def add_messages(self, round: Round, exchanged: int) -> None:
        """Add the bytes between clients, each message as sent and as received."""
        round.bytes_exchanged = exchanged
        down, up = (self.values[f"round/bytes_{way}"] + exchanged for way in ("down", "up"))
        self.bytes_total += down + up
        self.values = {
            **self.values,
            "round/bytes_down": down,
            "round/bytes_up": up,
            "round/bytes_total": self.bytes_total,
        }
        self.logger = (*self.logger, "round/bytes_total")

    def refuse_server(
        self, federation: FederationState, round: Round, verdict: Verdict, why: str
    ) -> None:
        """Count a round as one that left out all clients, and name the likely cause."""
        norms = torch.where(verdict.accepted, verdict.norms, -1.0)
        largest, median = int(norms.argmax()), verdict.median
        client = int(round.info.index[largest])
        for each in round.info.index.tolist():
            round.rejected.setdefault(each, f"the server refused its step: {why}")
        self.values = {**self.values, "round/rejected": float(len(round.rejected))}
        remedy = (
            "Look at the data of this client, or set max_update_norm='auto' to leave such clients "
            "out."
            if client in verdict.outliers
            else "Use smaller learning rates of the clients, or of the server's optimizer."
        )
        rank_zero_warn(
            f"Round {round.number}: the server refused its step and stays as it was: {why}. The "
            f"largest update is that of {federation.client_names[client]!r} "
            f"({float(norms[largest]):.3g}; the median is {median:.3g}). {remedy}"
        )

    def add(self, measured: Mapping[str, float]) -> None:
        """Log further values, by name."""
        self.values = {**self.values, **measured}
        self.logger = (*self.logger, *measured)

    def warn(self, texts: Mapping[str, str]) -> None:
        """Warn of findings by any key; of each key once."""
        for key, text in texts.items():
            if key not in self._warned:
                self._warned |= {key}
                rank_zero_warn(text)

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the round so far, and the bytes of all rounds."""
        return {
            "logged": dict(self.values),
            "prog_bar": list(self.prog_bar),
            "logger": list(self.logger),
            "bytes_total": self.bytes_total,
            "first_loss": self.first_loss,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.values = dict(saved["logged"])
        self.prog_bar, self.logger = tuple(saved["prog_bar"]), tuple(saved["logger"])
        self.bytes_total = saved.get("bytes_total", 0.0)
        self.first_loss = saved.get("first_loss")


def _total(sizes: Tensor | None, tree: Tree, clients: int) -> int:
    """Sum the bytes of all clients: the method's counts, or those of the tree."""
    return nbytes(tree) * clients if sizes is None else int(sizes.sum())


def _means(result: LocalResult, accepted: Tensor) -> tuple[dict[str, float], Tensor]:
    """Average what steps logged over accepted clients; names without a value are left out.

    Returns:
        The means, and the clients' losses on the host, NaN for those that aren't accepted.
    """
    names = list(result.logs)
    # One copy to the host, for which it waits.
    logged = [*(result.logs[name] for name in names), result.loss]
    *values, losses = torch.stack([each.double() for each in logged]).cpu()
    losses = losses.where(accepted, torch.nan)
    if not names or not accepted.any():
        return {}, losses
    means = torch.stack(values)[:, accepted].nanmean(1).tolist()
    return {name: mean for name, mean in zip(names, means, strict=True) if mean == mean}, losses


def _listed(federation: FederationState, reasons: Mapping[int, str]) -> str:
    """Name the first ten clients with their reasons."""
    names = federation.client_names
    return "; ".join(f"{names[k]!r}: {reason}" for k, reason in list(reasons.items())[:10])
