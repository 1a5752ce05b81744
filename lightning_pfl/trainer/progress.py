"""Lightning's per-batch hooks, called once per client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
from torch import Tensor

from lightning_pfl._lightning import ClientHooks, close_step, open_step
from lightning_pfl.core.randomness import put_generators_back
from lightning_pfl.federation.ranks import Ranks


def profiled(step: str) -> str:
    """Return the profiler's name of a step of all clients, as in Lightning's strategies.

    PyTorchProfiler counts its own steps by the end of the name.
    """
    return f"[Strategy]FederatedStrategy.{step}"


def _no_samples(client: int) -> str:
    return (
        f"Expected no access to samples: FederatedStrategy calls the hooks of a callback around a "
        f"batch once per client, and `batch` is the client's id, {int(client)}. Look at samples in "
        "the module's step, or in its own `on_train_batch_end`, which gets each minibatch."
    )


class ClientBatch(int):
    """The ``batch`` of hooks that are called once per client: its id, which has no samples."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(_no_samples(self))

    def __len__(self) -> int:
        raise TypeError(_no_samples(self))

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(_no_samples(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_no_samples(self))


class ClientOutputs(dict[str, Tensor]):
    """The ``outputs`` of ``on_train_batch_end``: the mean ``loss`` of the client's minibatches."""

    def __missing__(self, key: str) -> Tensor:
        raise KeyError(
            f"Expected the key 'loss', but got {key!r}: FederatedStrategy calls the hook of a "
            "callback once per client, and `outputs` has the client's mean loss. Log other values "
            "in `training_step`."
        )


class ClientProgress:
    """Fires ``on_<stage>_batch_start`` and ``..._end`` for clients when they finish.

    The vectorized engine finishes a chunk of clients at once, so a progress bar moves by chunks.

    ``batch`` is the client's id, ``batch_idx`` the number of clients before it, ``outputs`` the
    client's mean loss in training.

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
        self.held: tuple[ClientBatch, ClientOutputs | None] | None = None

    def finished(self, positions: list[int], losses: Callable[[], Tensor] | None = None) -> bool:
        """Fire the hooks of clients that an engine has finished; whether they may write."""
        if self.live and (self.start or self.end):
            put_generators_back()
        if self.live:
            self._take(positions, losses)
        return self.live and (self.start.may_write or self.end.may_write)

    def finish(self, losses: Tensor | None = None) -> None:
        """Fire the hooks of clients that the engine didn't report.

        Args:
            losses: The losses of all clients, ``(clients,)``; None in an evaluation.
        """
        waiting = sorted(self.waiting)
        self._take(waiting, None if losses is None else partial(losses.__getitem__, waiting))

    def _take(self, positions: list[int], losses: Callable[[], Tensor] | None) -> None:
        if not (self.start or self.end):
            self._count(len(self.waiting.intersection(positions)))
            self.waiting.difference_update(positions)
            self.counters.is_last_batch = not self.waiting
            return
        values = None if losses is None else losses()
        for number, position in enumerate(positions):
            if position not in self.waiting:
                continue
            self.waiting.remove(position)
            client = ClientBatch(self.ids[position])
            outputs = None if values is None else ClientOutputs(loss=values[number])
            self._begin(client)
            if self.hold_last and not self.waiting:
                self.held = client, outputs
            else:
                self._end(client, outputs)

    def _count(self, clients: int) -> None:
        """Count clients for whom nothing is to fire, all at once, as there may be thousands."""
        for _ in range(min(clients, 2)):  # the first one differs from the others
            open_step(self.trainer, self.results, 0)
            close_step(self.trainer, self.results, logs=False)
        for progress in (self.counters.total, self.counters.current):
            progress.ready += clients
            progress.started += clients
            progress.processed += clients
            progress.completed += clients

    def release(self) -> None:
        """End the client that was held back."""
        if self.held is not None:
            self._end(*self.held)
            self.held = None

    def _begin(self, client: ClientBatch) -> None:
        open_step(self.trainer, self.results, int(client))
        self.counters.increment_ready()
        self.counters.is_last_batch = not self.waiting
        self.start(client, self.counters.current.ready - 1, last=not self.waiting)
        self.counters.increment_started()

    def _end(self, client: ClientBatch, outputs: ClientOutputs | None) -> None:
        self.counters.increment_processed()
        self.end(outputs, client, self.counters.current.ready - 1, last=not self.waiting)
        self.counters.increment_completed()
        close_step(self.trainer, self.results, logs=True)
