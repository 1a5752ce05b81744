"""FedASA: every client selects the cells of the network that it shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice, check_integer, check_used, is_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, dot, select, sub, total_nbytes
from lightning_pfl.methods.base import (
    PER_CLIENT,
    SHARED,
    About,
    Known,
    Method,
    PerClient,
    Weighting,
)
from lightning_pfl.solvers.owners import owners_mean

Rule = Literal["all", "given", "random", "drift"]


class FedASA(Method):
    r"""Every client shares some cells of the network; a cell is the mean over those who share it.

    A cell :math:`c` is a submodule. Client :math:`k` shares it where :math:`s_{kc} = 1`: it then
    starts from the server's cell :math:`x_c`, otherwise from its own. It trains all cells, and
    sends those that it shares:

    .. math::
        x_c \leftarrow \frac{\sum_{k \in S_t} p_k\, s_{kc}\, y_{kc}}{\sum_{k \in S_t} p_k\, s_{kc}}

    A cell that nobody of the cohort shares stays. The rules for :math:`s_{kc}`:

    - ``"all"``: every cell, which is FedAvg.
    - ``"given"``: the cells in ``shared``.
    - ``"random"``: a part of the cells, ``share``, which every client draws anew after ``every``
      rounds.
    - ``"drift"``: all at first. In each round whose number is a multiple of ``every``, but for the
      first, the server also sends how its cells moved in the last round, and a client that takes
      part shares from now on the cells in which the cosine of this move and its own is above
      ``threshold``. A cell where one of them is 0 is shared.

    Args:
        cells: Names of submodules, which have all parameters, each once. None: every submodule with
            parameters of its own.
        rule: ``"all"``, ``"given"``, ``"random"`` or ``"drift"``.
        shared: For ``"given"``: names of the cells that all clients share, or a list of names for
            each client, in the order of the ids.
        share: For ``"random"``: the part of the cells that a client shares, in [0, 1]; their number
            is rounded.
        threshold: For ``"drift"``: the cosine in [-1, 1] above which a cell is shared.
        every: For ``"random"`` and ``"drift"``: rounds from one selection to the next, >= 1.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"``: :math:`p_k = N_k / \sum N_j`; ``"uniform"``.

    Raises:
        ValueError: Before the first round, if a parameter is in no cell or in two, or a shared cell
            is none.

    State:
        server: ``model``. With ``"drift"`` also ``step``, the parameters' last move, and
        ``shared``, bool ``(num_clients, cells)``, which the clients told. client_state: ``model``,
        all cells as the client trained them last; with ``"drift"`` also ``shared``, bool
        ``(clients, cells)``.

    Deviation from the paper: only its abstract is known to us, which has the selection of cells by
    the devices and the mean of each cell over those who share it. The rules of selection, what a
    client does with cells that it doesn't share, and the defaults are ours.

    Example:
        >>> FedASA(["backbone", "head"], "given", shared=["backbone"]).rule
        'given'

    References:
        Deng, Wu, Zhang, et al. FedASA: A personalized federated learning with adaptive model
        aggregation for heterogeneous mobile edge computing. IEEE Transactions on Mobile Computing
        23(12), 2024.
    """

    about = About(
        family="a personal part",
        personal="the layers that a client selects",
        assumes="clients differ in which layers suit all of them",
        down="$4d_S$, the shared cells; with `drift` at times $4d$ more",
        up="$4d_S$; with `drift` a byte per cell more",
        keeps="model",
        gradients="1",
        personal_model="the server's cells where it shares them, its own elsewhere",
        global_model="the server's, unless a cell is shared by nobody by rule",
        paper="Deng et al. 2024",
    )
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"shared": 1})
    state_settings = ("rule", "cells")

    def __init__(
        self,
        cells: Sequence[str] | None = None,
        rule: Rule = "drift",
        shared: Sequence[str] | Sequence[Sequence[str]] | None = None,
        share: float = 0.5,
        threshold: float = 0.0,
        every: int = 1,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_types(FedASA.__init__, {"cells": cells})
        check_choice("rule", rule, get_args(Rule), "Use 'drift' to let the clients decide.")
        if (rule == "given") != (shared is not None):
            raise ValueError(
                f"Expected `shared` with rule='given' and only then, but got rule={rule!r} and "
                f"shared={shared!r}. Name the cells that clients share, such as ['backbone']."
            )
        for name, value, least in (("share", share, 0), ("threshold", threshold, -1)):
            if not is_number(value) or not least <= value <= 1:
                raise ValueError(
                    f"Expected `{name}` to be in [{least}, 1], but got {name}={value!r}. Use "
                    f"{name}=0.5, for example."
                )
        check_integer("every", every, 1, "Use 1 to select in each round.")
        check_used(FedASA.__init__, {"cells": cells}, rule != "all", "a rule that selects")
        check_used(FedASA.__init__, {"share": share}, rule == "random", "rule='random'")
        check_used(FedASA.__init__, {"threshold": threshold}, rule == "drift", "rule='drift'")
        often = rule in ("drift", "random")
        check_used(FedASA.__init__, {"every": every}, often, "rule='drift' or 'random'")
        self.cells = None if cells is None else list(cells)
        self.rule, self.shared = rule, shared
        self.share, self.threshold, self.every = share, threshold, every

    # --- which cells are shared ---

    def bind(self, known: Known) -> None:
        """Find the cells, and those that are given."""
        super().bind(known)
        self.members = _members(self.parameter_split, self.cells)
        names = list(self.members)
        self.given = torch.ones(self.num_clients, len(names), dtype=torch.bool)
        if self.shared is None:
            return
        each = _lists(self.shared, self.num_clients)
        if len(each) != self.num_clients:
            raise ValueError(
                f"Expected `shared` to have a list for each of {self.num_clients} clients, but got "
                f"{len(each)}. Give one per client, or one list of names for all."
            )
        if unknown := sorted({cell for cells in each for cell in cells} - set(names)):
            raise ValueError(
                f"Expected `shared` to name cells, {', '.join(names)}, but got {unknown[0]!r}. Use "
                "these names, or set `cells`."
            )
        self.given = torch.tensor([[name in cells for name in names] for cells in each])

    def _shared(self, tree: Tree, info: ClientInfo) -> Tensor:
        """Return who shares which cell, bool ``(clients, cells)``, on the CPU without ``drift``.

        Args:
            tree: The clients' rows of what has ``shared``.
            info: The clients and the round.
        """
        if self.rule == "drift":
            found: Tensor = tree["shared"]
            return found
        if self.rule != "random":
            return self.given[info.index]
        cells = len(self.members)
        count = int(self.share * cells + 0.5)
        shared = torch.zeros(len(info), cells, dtype=torch.bool)
        for row, client in zip(shared, info.index.tolist(), strict=True):
            key = derive(self.seed, "cells", info.round // self.every, client)
            row[permutation(cells, key)[:count]] = True
        return shared

    def _selects(self, round: int) -> bool:
        return self.rule == "drift" and round > 0 and round % self.every == 0

    def _entries(self, shared: Tensor, model: Model) -> Model:
        """Find the entries of shared cells, bool ``(clients, 1, ...)`` like ``model``."""
        found = {}
        for cell, names in zip(shared.unbind(1), self.members.values(), strict=True):
            for name in names:
                leaf = model[name]
                found[name] = send(cell, leaf.device).view(-1, *[1] * (leaf.ndim - 1))
        return found

    def _merged(self, shared: Tensor, theirs: Model, own: Model) -> Model:
        """Take shared cells from ``theirs`` and the other ones from ``own``."""
        entries = self._entries(shared, own)
        return {name: theirs[name].where(entries[name], leaf) for name, leaf in own.items()}

    def ownership(self, parameter_split: ParameterSplit) -> dict[str, frozenset[str]]:
        """Return entries by ownership: cells differ unless all clients share them by rule."""
        everybody: set[str] = set()
        if self.rule == "all":
            everybody = set(parameter_split.names)
        elif self.shared is not None:
            members = _members(parameter_split, self.cells)
            common = set.intersection(*map(set, _lists(self.shared, 1)))
            everybody = {name for cell in common for name in members.get(cell, ())}
        differ = frozenset(parameter_split.names) - everybody
        return {SHARED: frozenset(everybody), PER_CLIENT: differ}

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line for settings that make this another method."""
        share = self.share if self.rule == "random" else None
        if self.rule == "all" or share == 1:
            return ["Every cell is shared, which makes FedASA FedAvg."]
        if share == 0 or (self.rule == "given" and not any(self.shared or ())):
            return ["No cell is shared, which makes FedASA LocalOnly."]
        return []

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Start with the module's model, which hasn't moved; all cells are shared."""
        server: Tree = {"model": model}
        if self.rule == "drift":
            first = next(iter(model.values()))
            trainable = select(model, self.parameter_split.trainable)
            server["step"] = {name: torch.zeros_like(leaf) for name, leaf in trainable.items()}
            server["shared"] = send(self.given, first.device)
        return server

    def init_client_state(self, model: Model) -> Tree:
        """Start with the module's model, of which everything is shared."""
        if self.rule != "drift":
            return {"model": model}
        first = next(iter(model.values()))
        return {"model": model, "shared": send(self.given[0], first.device)}

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the model, and its last move in rounds in which clients select."""
        step = {"step": server["step"]} if self._selects(info.round) else {}
        return {"model": server["model"], **step}

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor:
        """Count the bytes of the cells that each client shares, and of the server's move."""
        known = {"shared": server["shared"][info.index]} if self.rule == "drift" else {}
        more = total_nbytes(server["step"]) if self._selects(info.round) else 0
        return self._nbytes(self._shared(known, info), server["model"]) + more

    def upload_nbytes(self, uploads: Tree, info: ClientInfo) -> Tensor:
        """Count the bytes of the cells that each client shares, and of its selection."""
        model = {name: leaf[0] for name, leaf in uploads["model"].items()}
        more = len(self.members) if self.rule == "drift" else 0
        return self._nbytes(self._shared(uploads, info), model) + more

    def _nbytes(self, shared: Tensor, model: Model) -> Tensor:
        sizes = [
            sum(model[name].numel() * model[name].element_size() for name in names)
            for names in self.members.values()
        ]
        return shared.cpu().long() @ torch.tensor(sizes)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start from the server's shared cells and the client's other ones."""
        shared = self._shared(client_state, info)
        return {"model": self._merged(shared, received["model"], client_state["model"])}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the shared cells; the other ones stay what was received, which is nothing new."""
        shared = self._shared(client_state, info)
        if "step" in received:
            start = self._merged(shared, received["model"], client_state["model"])
            shared = self._agreeing(sub(select(state["model"], received["step"]), start), received)
        told = {"shared": shared} if self.rule == "drift" else {}
        sent = self._merged(shared, state["model"], received["model"])
        return {"model": sent, **told}, {"model": state["model"], **told}

    def _agreeing(self, moved: Model, received: Tree) -> Tensor:
        """Find the cells that moved as the server's did, bool ``(clients, cells)``."""
        first = next(iter(moved.values()))
        shape = len(first), len(self.members)
        agree = torch.ones(shape, dtype=torch.bool, device=first.device)
        for cell, names in enumerate(self.members.values()):
            mine, theirs = select(moved, names), select(received["step"], names)
            if mine:  # Buffers alone don't move.
                lengths = (dot(mine, mine) * dot(theirs, theirs)).sqrt()
                agree[:, cell] = (dot(mine, theirs) > self.threshold * lengths) | (lengths == 0)
        return agree

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average every cell over those who share it."""
        old = server["model"]
        entries = self._entries(self._shared(uploads, info), uploads["model"])
        new = owners_mean(old, uploads["model"], entries, info.weights)
        if self.rule != "drift":
            return {"model": new}
        step = sub(select(new, server["step"]), old)
        told = server["shared"].index_copy(
            0, send(info.index, server["shared"].device), uploads["shared"]
        )
        return {"model": new, "step": step, "shared": told}

    # --- what is evaluated and handed out ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the server's cells where they are shared, and the client's elsewhere."""
        shared = self._shared(client_state, info)
        return self._merged(shared, received["model"], client_state["model"])

    def global_model(self, server: Tree) -> Model | None:
        """Return the server's model, or None if by rule no client shares one of its cells."""
        return dict(server["model"]) if bool(self.given.any(0).all()) else None


def _lists(shared: Sequence[str] | Sequence[Sequence[str]], clients: int) -> list[list[str]]:
    """Return the names of each client's cells."""
    names = [cell for cell in shared if isinstance(cell, str)]
    if len(names) == len(shared):
        return [names] * clients
    return [list(cells) for cells in shared]


def _members(parameter_split: ParameterSplit, cells: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the entries of each cell, or raise ValueError."""
    names = parameter_split.names
    if cells is None:
        own: dict[str, list[str]] = {}
        for name in names:
            own.setdefault(name.rpartition(".")[0] or name, []).append(name)
        return own
    found = {cell: parameter_split.match(cell, "cells") for cell in cells}
    for name in names:
        owners = [cell for cell, members in found.items() if name in members]
        if len(owners) != 1:
            where = f"in {owners[0]!r} and in {owners[1]!r}" if owners else "in none"
            raise ValueError(
                f"Expected `cells` to have every parameter once, but {name!r} is {where}. Name "
                "submodules side by side, such as ['backbone', 'head']."
            )
    return {cell: [name for name in names if name in members] for cell, members in found.items()}
