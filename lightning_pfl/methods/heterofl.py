"""HeteroFL: clients train parts of different widths of one network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice, check_used
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, expand, select
from lightning_pfl.methods.base import (
    PER_CLIENT,
    SHARED,
    About,
    Known,
    LocalStep,
    Method,
    PerClient,
    Weighting,
    recordable,
)
from lightning_pfl.models.layers import Scaler
from lightning_pfl.solvers.owners import owners_mean

Rule = Literal["first", "rolling", "random"]
FULL = "full"
MIXES_CHANNELS = (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)
"""Layers that see all channels of a sample, which are fewer in a narrow network."""


class HeteroFL(Method):
    r"""Clients train narrow parts of one network; each entry is the mean over those that own it.

    The module is the network of full width. ``narrow`` has the same network with fewer units in
    some layers. A client owns as many units of each layer as its network has, and trains them
    alone. The server's entry becomes the mean over the clients of the cohort that own it,

    .. math::
        x_i \leftarrow \frac{\sum_{k: i \in o_k} p_k\, y_{k,i}}{\sum_{k: i \in o_k} p_k},

    and stays where nobody does. A narrow network is simulated inside of the full one, whose other
    entries are 0: outputs and gradients are the same, at the full network's cost.

    Units are the first ones of each layer in HeteroFL. With ``"rolling"`` (FedRolex) they are a
    window that moves with the rounds, with ``"random"`` each client draws some anew in a round.
    Both move whole blocks of units, as many in all layers, so that what is flattened or added stays
    with its units; all layers must be narrowed by one share.

    Args:
        narrow: Networks by name, of the module's structure with smaller sizes; needed. The module
            itself is ``"full"``.
        groups: Each client's network, in the order of the ids, or one for all. None: the clients
            take turns, the full one first; so do new clients, which a list says nothing of.
        rule: ``"first"``, ``"rolling"`` or ``"random"``.
        masked_classes: Whether a client leaves rows of the classifier alone whose classes it has no
            sample of; their outputs are then 0 for it, in training and evaluation.
        classifier: The layer whose outputs are classes; for ``masked_classes``.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"``.

    Raises:
        ValueError: Before the first round, if a network isn't the module's with smaller sizes, or a
            group has no network.
        MisconfigurationException: Before the first round, if a layer mixes channels (LayerNorm,
            GroupNorm); in it, if classes can't be counted or aren't the classifier's outputs.

    State:
        server: ``model``, of full width. client_state: with masked classes ``classes``, which of
        them the client has, bool ``(clients, classes)``; all until it takes part.

    Deviation from the paper: BatchNorm has running statistics, which the owners average; the paper
    computes them anew from all clients' data. Bytes are those of the narrow network, also for rows
    of masked classes. :class:`~lightning_pfl.models.Scaler` is a layer of the user's networks.

    Example:
        >>> from lightning_pfl.models import MLP
        >>> HeteroFL({"half": MLP([64, 20, 10])}, groups="half", masked_classes=False).rule
        'first'

    References:
        Diao, Ding, Tarokh. HeteroFL: Computation and communication efficient federated learning for
        heterogeneous clients. ICLR 2021. arXiv:2010.01264, Algorithm 1. Alam, Liu, Yan, Zhang.
        FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction. NeurIPS
        2022. arXiv:2212.01548 (``"rolling"``).
    """

    about = About(
        family="a personal part",
        personal="the width of the network",
        assumes="clients can train networks of different sizes",
        down="$4d_r$, the narrow network's",
        up="$4d_r$, the narrow network's, and a byte per class",
        keeps="its classes",
        gradients="1",
        personal_model="the client's part of the server's network, all other weights 0",
        global_model="the network of full width",
        paper="Diao et al. 2021; Alam et al. 2022",
    )

    def __init__(
        self,
        narrow: Mapping[str, nn.Module] | None = None,
        groups: Sequence[str] | str | None = None,
        rule: Rule = "first",
        masked_classes: bool = True,
        classifier: ParameterSpec = "head",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_types(HeteroFL.__init__, {"masked_classes": masked_classes, "groups": groups})
        networks = narrow.values() if isinstance(narrow, Mapping) else ()
        if (
            not isinstance(narrow, Mapping)
            or FULL in narrow
            or not all(isinstance(network, nn.Module) for network in networks)
        ):
            raise ValueError(
                f"Expected `narrow` to be networks by name, without {FULL!r}, but got "
                f"narrow={narrow!r}. Use {{'half': ...}}; the module itself is the full network."
            )
        check_choice("rule", rule, get_args(Rule), "Use 'first' as in HeteroFL.")
        only = {"classifier": classifier}
        check_used(HeteroFL.__init__, only, masked_classes, "masked_classes=True")
        self.narrow, self.rule = dict(narrow), rule
        self.groups = groups if groups is None or isinstance(groups, str) else list(groups)
        self.masked_classes, self.classifier = masked_classes, classifier
        self.needs_label_counts = masked_classes  # type: ignore[misc]
        names = (FULL, *self.narrow)
        given = {self.groups} if isinstance(self.groups, str) else set(self.groups or ())
        if unknown := sorted(given - set(names)):
            raise ValueError(
                f"Expected `groups` to name networks, {', '.join(names)}, but got {unknown[0]!r}. "
                "Use one of them for each client."
            )

    # --- who owns what ---

    def bind(self, known: Known) -> None:
        """Compare the networks with the module, and give each client one."""
        super().bind(known)
        _check_layers(self.parameter_split.module)
        names = (FULL, *self.narrow)
        groups = self.groups
        if groups is None or isinstance(groups, str):
            turns = self._turns
            groups = [turns[k % len(turns)] for k in range(self.num_clients)]
        if len(groups) != self.num_clients:
            raise ValueError(
                f"Expected `groups` to have a network for each of {self.num_clients} clients, but "
                f"got {len(groups)}. Give one per client, in the order of the ids."
            )
        self.network = torch.tensor([names.index(group) for group in groups])
        whole = self.parameter_split.model()
        entries = {name: module.state_dict() for name, module in self.narrow.items()}
        self.sizes: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(leaf.shape) for name, leaf in whole.items()},
            *(_sizes(name, whole, found) for name, found in entries.items()),
        ]
        self.blocks = 0 if self.rule == "first" else _blocks(self.sizes)
        self.scalers = {
            entry: torch.stack(
                [each[entry].to(whole[entry]) for each in (whole, *entries.values())]
            )
            for entry in _scalers(self.parameter_split)
        }

    @property
    def _turns(self) -> tuple[str, ...]:
        """Networks that clients have in turn, unless a list is given."""
        return (self.groups,) if isinstance(self.groups, str) else (FULL, *self.narrow)

    def _networks(self, index: Tensor) -> Tensor:
        """Find the numbers of networks, int64 ``(clients,)``; new clients go on with the turns."""
        found = self.network[index.clamp_max(self.num_clients - 1)]
        new = (index >= self.num_clients).nonzero().flatten().tolist()
        if new and isinstance(self.groups, list):
            raise MisconfigurationException(
                "Expected `groups` to say which network new clients have, but got a list of the "
                f"{self.num_clients} clients in the run. Use one name for all, or None for turns."
            )
        names, turns = (FULL, *self.narrow), self._turns
        for at in new:
            found[at] = names.index(turns[int(index[at]) % len(turns)])
        return found

    def _classes(self, info: ClientInfo, device: torch.device) -> Tensor:
        """Find the classes that clients have, bool ``(clients, classes)``."""
        counts = self.known.require_label_counts("HeteroFL(masked_classes=True)")
        # A counter of batches, which BatchNorm has, is of no dimension.
        shapes = {self.sizes[0][name][:1] for name in self._rows(self.parameter_split)}
        if shapes != {(counts.shape[1],)}:
            raise MisconfigurationException(
                f"Expected `classifier` to be a layer with {counts.shape[1]} outputs, one per "
                f"class, but got classifier={self.classifier!r} with {sorted(shapes)}. Name the "
                "last layer, or use masked_classes=False."
            )
        return send(counts[info.index] > 0, device)

    def _rows(self, parameter_split: ParameterSplit) -> frozenset[str]:
        return parameter_split.match(self.classifier, "classifier")

    def ownership(self, parameter_split: ParameterSplit) -> dict[str, frozenset[str]]:
        """Return entries by ownership: those of narrow layers differ between clients."""
        whole = parameter_split.model()
        differ: set[str] = set()
        if self.masked_classes:
            differ |= self._rows(parameter_split)
        if self.rule == "random" or not isinstance(self.groups, str):  # else all own the same
            differ |= set(_scalers(parameter_split))
            for module in self.narrow.values():
                entries = module.state_dict()
                differ |= {n for n in whole if n in entries and entries[n].shape != whole[n].shape}
        return {SHARED: parameter_split.shared - differ, PER_CLIENT: frozenset(differ)}

    def _owned(self, info: ClientInfo, device: torch.device, classes: Tensor | None) -> Model:
        """Find the entries that clients own in a round, bool ``(clients, ...)``.

        Without entries that all of them own.

        Args:
            info: The clients.
            device: Where the result is.
            classes: The classes that clients have, bool ``(clients, classes)``; None for all.
        """
        groups = self._networks(info.index)
        owned: Model = {}
        for name, shape in self.sizes[0].items():
            whole = all(size[name] == shape for size in self.sizes)
            rows = classes is not None and name in self._rows(self.parameter_split)
            if whole and not rows:
                continue
            mask = torch.ones(len(info), *shape, dtype=torch.bool, device=device)
            for axis, full in enumerate(shape):
                mine = send(self._units(info, groups, name, axis), device)
                if rows and axis == 0 and classes is not None:
                    mine = mine & classes
                mask &= mine.view(len(info), *[full if i == axis else 1 for i in range(len(shape))])
            owned[name] = mask
        return owned

    def _units(self, info: ClientInfo, groups: Tensor, name: str, axis: int) -> Tensor:
        """Find the units of an axis that clients own, bool ``(clients, units)``."""
        full = self.sizes[0][name][axis]
        counts = torch.tensor([size[name][axis] for size in self.sizes])[groups]
        if self.rule == "first" or bool((counts == full).all()):
            return torch.arange(full) < counts.unsqueeze(1)
        width = full // self.blocks
        blocks = torch.stack(
            [self._order(info, client) < count // width for client, count in
             zip(info.index.tolist(), counts.tolist(), strict=True)]
        )  # fmt: skip
        return blocks.repeat_interleave(width, 1)

    def _order(self, info: ClientInfo, client: int) -> Tensor:
        """Rank the blocks of a round: a client takes the first ones, int64 ``(blocks,)``."""
        if self.rule == "rolling":
            return (torch.arange(self.blocks) - info.round) % self.blocks
        return permutation(self.blocks, derive(self.seed, "units", info.round, client))

    def _part(self, model: Model, owned: Model, info: ClientInfo) -> Model:
        """Set what clients don't own to 0, and their scalers to their rates."""
        part = {
            name: leaf * owned[name].to(leaf) if name in owned else leaf
            for name, leaf in model.items()
        }
        groups = self._networks(info.index)
        return part | {name: rates[groups].to(model[name]) for name, rates in self.scalers.items()}

    # --- state ---

    def init_client_state(self, model: Model) -> Tree:
        """Assume all classes, until the client takes part."""
        if not self.masked_classes:
            return {}
        rows = next(leaf for n, leaf in model.items() if n in self._rows(self.parameter_split))
        return {"classes": torch.ones(len(rows), dtype=torch.bool, device=rows.device)}

    # --- a client's round ---

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor:
        """Count the bytes of each client's network."""
        return self._nbytes(server["model"])[self._networks(info.index)]

    def upload_nbytes(self, uploads: Tree, info: ClientInfo) -> Tensor:
        """Count the bytes of each client's network, and of its classes."""
        classes = uploads["classes"].shape[1] if self.masked_classes else 0
        return self._nbytes(uploads["model"])[self._networks(info.index)] + classes

    def _nbytes(self, model: Model) -> Tensor:
        found = [
            sum(math.prod(size[name]) * leaf.element_size() for name, leaf in model.items())
            for size in self.sizes
        ]
        return torch.tensor(found)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Begin with the client's part of the network."""
        model = received["model"]
        device = next(iter(model.values())).device
        own = {"classes": self._classes(info, device)} if self.masked_classes else {}
        owned = self._owned(info, device, own.get("classes"))
        return {"model": self._part(model, owned, info), "owned": owned, **own}

    @recordable()
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step what the client owns."""
        model, owned = state["model"], state["owned"]
        grads = client.grad(model, minibatches)
        mine = {n: g * owned[n].to(g) if n in owned else g for n, g in grads.items()}
        return {**state, "model": client.update(model, mine)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the client's part, and its classes."""
        own = {"classes": state["classes"]} if self.masked_classes else {}
        return {"model": state["model"], **own}, own

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average every entry over its owners."""
        old = server["model"]
        device = next(iter(old.values())).device
        owned = self._owned(info, device, uploads.get("classes"))
        new = owners_mean(old, uploads["model"], owned, info.weights)
        return {"model": {**new, **select(old, self.scalers)}}

    # --- what is evaluated and handed out ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the client's part, with 0 elsewhere."""
        model = received["model"]
        device = next(iter(model.values())).device
        return self._part(model, self._owned(info, device, client_state.get("classes")), info)

    def narrow_state_dict(self, model: Mapping[str, Tensor], client: int, round: int) -> Model:
        """Cut a client's network out of the full one, for its own module.

        Args:
            model: The network of full width, as a ``state_dict``.
            client: Its id.
            round: The round that decides on its units; without effect for ``rule="first"``.
        """
        one = torch.tensor([client])
        info = ClientInfo(one, one, one, one.double(), round, self.num_clients)
        whole = select(dict(model), self.sizes[0])
        cut = self._part(expand(whole, 1), {}, info)
        found = {}
        for name, leaf in cut.items():
            part = leaf[0]
            for axis in range(part.ndim):
                units = self._units(info, self._networks(one), name, axis)[0].nonzero().flatten()
                part = part.index_select(axis, send(units, part.device))
            found[name] = part
        return found


def _sizes(name: str, whole: Model, narrow: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a narrow network's entries, or raise ValueError."""
    for entry, leaf in whole.items():
        found = tuple(narrow[entry].shape) if entry in narrow else None
        if (
            found is None
            or len(found) != leaf.ndim
            or any(a > b for a, b in zip(found, leaf.shape, strict=True))
        ):
            raise ValueError(
                f"Expected `narrow[{name!r}]` to be the module with smaller sizes, but its "
                f"{entry!r} is {found} where the module's is {tuple(leaf.shape)}. Build both by "
                "one function of the width."
            )
    return {entry: tuple(narrow[entry].shape) for entry in whole}


def _blocks(sizes: list[dict[str, tuple[int, ...]]]) -> int:
    """Count the blocks of units that move together, or raise ValueError."""
    axes = {
        (full, *(size[name][axis] for size in sizes[1:]))
        for name, shape in sizes[0].items()
        for axis, full in enumerate(shape)
    }
    narrowed = [widths for widths in axes if len(set(widths)) > 1]
    shares = {tuple(Fraction(width, widths[0]) for width in widths) for widths in narrowed}
    if len(shares) > 1:
        found = ["/".join(str(share) for share in each[1:]) for each in sorted(shares)]
        raise ValueError(
            "Expected all layers to be narrowed by one share, as units move in blocks, but got "
            f"{', '.join(found)}. Use rule='first', or widths in one proportion."
        )
    # A whole number of these blocks is in every narrow layer, as it is in their combinations.
    return math.gcd(*(widths[0] for widths in narrowed)) if narrowed else 1


def _scalers(parameter_split: ParameterSplit) -> list[str]:
    return [
        f"{name}.rate"
        for name, layer in parameter_split.module.named_modules()
        if isinstance(layer, Scaler)
    ]


def _check_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, MIXES_CHANNELS):
            raise MisconfigurationException(
                "Expected a network whose layers treat channels apart, as narrow ones have fewer, "
                f"but got {name}, a {type(layer).__name__}. Use BatchNorm or InstanceNorm."
            )
