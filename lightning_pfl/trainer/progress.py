"""Lightning's per-batch hooks, called once per client."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor

from lightning_pfl._lightning import ClientHooks, close_step, open_step
from lightning_pfl.federation.ranks import Ranks


def profiled(step: str) -> str:
    """Return the profiler's name of a step of all clients, as in Lightning's strategies.

    PyTorchProfiler counts its own steps by the end of the name.
    """
    return f"[Strategy]FederatedStrategy.{step}"


class ClientProgress:
    """Fires ``on_<stage>_batch_start`` and ``..._end`` for clients when they finish.

    The vectorized engine finishes a chunk of clients at once, so a progress bar moves by chunks.

    ``batch`` is the client's id, ``batch_idx`` the number of clients before it.

    Args:
        trainer: The running Trainer.
        ranks: The processes of the run.
        loop: The loop whose batch counters count the clients, and whose results hooks log to.
        clients: Ids, int64 ``(clients,)``.
        stage: ``"train"``, ``"validation"`` or ``"test"``.
        hold_last: Whether the last client's end waits for :meth:`release`.

    With several processes the hooks fire for all clients in every process, and only in
    :meth:`finish`, since a hook may make collective calls (to stop after ``max_time``), so all
    processes must fire it equally often, at the same place.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        ranks: Ranks,
        loop: Any,
        clients: Tensor,
        stage: str,
        hold_last: bool = False,
    ) -> None:
        self.trainer, self.hold_last = trainer, hold_last
        self.live = ranks.alone
        self.counters, self.results = loop.batch_progress, loop._results
        self.ids = clients.tolist()
        self.waiting = set(range(len(self.ids)))
        # A module's are called for its minibatches, by the clients' loop.
        of_module = stage != "train"
        self.start = ClientHooks(trainer, f"on_{stage}_batch_start", of_module)
        self.end = ClientHooks(trainer, f"on_{stage}_batch_end", of_module)
        self.held: int | None = None

    def finished(self, positions: list[int]) -> None:
        """Fire the hooks of clients that an engine has finished."""
        if self.live:
            self._take(positions)

    def finish(self) -> None:
        """Fire the hooks of clients that the engine didn't report."""
        self._take(sorted(self.waiting))

    def _take(self, positions: list[int]) -> None:
        for position in positions:
            if position not in self.waiting:
                continue
            self.waiting.remove(position)
            self._begin(self.ids[position])
            if self.hold_last and not self.waiting:
                self.held = self.ids[position]
            else:
                self._end(self.ids[position])

    def release(self) -> None:
        """End the client that was held back."""
        if self.held is not None:
            self._end(self.held)
            self.held = None

    def _begin(self, client: int) -> None:
        open_step(self.trainer, self.results, client)
        self.counters.increment_ready()
        self.counters.is_last_batch = not self.waiting
        self.start(client, self.counters.current.ready - 1)
        self.counters.increment_started()

    def _end(self, client: int) -> None:
        self.counters.increment_processed()
        self.end(None, client, self.counters.current.ready - 1)
        self.counters.increment_completed()
        close_step(self.trainer, self.results)
