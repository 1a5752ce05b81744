"""The starting models of new clients, and the entries that they train."""

from __future__ import annotations

from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, expand, total_nbytes, weighted_mean
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.federation import Federation

Start = Literal["personal", "global", "mean"]
TOGETHER = 2**27
"""Largest size in bytes of personal models that are averaged at once."""


def starting_models(federation: Federation, clients: int, start: Start) -> Model:
    """Make one starting model per new client, ``(clients, ...)``.

    Args:
        federation: The federation.
        clients: Number of new clients.
        start: ``"personal"``: the current shared part, the initial personal part; ``"global"``:
            the method's global model; ``"mean"``: the mean of all clients' personal models.
    """
    if start == "personal":
        return _personal(federation, clients)
    model = _mean(federation) if start == "mean" else _global(federation)
    models: Model = expand(model, clients)
    return models


def entries_to_adapt(federation: Federation, scope: ParameterSpec) -> frozenset[str]:
    """Resolve the entries that new clients train: the method's personal part, or what is named."""
    method, parameter_split = federation.method, federation.parameter_split
    if scope != "personal":
        if named := parameter_split.match(scope, "scope"):
            return named
        raise ValueError(
            f"Expected `scope` to have parameters that train, but got scope={scope!r}, which has "
            "none. Use 'head' or 'all', for example."
        )
    if names := method.personalized_entries(parameter_split):
        return names
    raise MisconfigurationException(
        "Expected a method with a personal part for scope='personal', but "
        f"{type(method).__name__} shares all parameters. Use scope='head' or scope='all'."
    )


def _personal(federation: Federation, clients: int) -> Model:
    # Ids outside of the federation, so that no method takes them for its clients.
    index = torch.arange(clients) + federation.num_clients
    none = torch.zeros(clients, dtype=torch.int64)
    weights = torch.full((clients,), 1 / clients, dtype=torch.float64)
    round = max(federation.rounds - 1, 0)
    info = ClientInfo(index, none, none, weights, round, federation.num_clients)
    client_state = expand(
        federation.method.init_client_state(federation.parameter_split.model()), clients
    )
    return federation.method.personal_model(federation.download(info), client_state, info)


def _global(federation: Federation) -> Model:
    model = federation.method.global_model(federation.server)
    if model is None:
        raise MisconfigurationException(
            f"Expected a method with a global model for start='global', but "
            f"{type(federation.method).__name__} has none. Use start='personal', or start='mean'."
        )
    return model


def _mean(federation: Federation) -> Model:
    """Average the personal models, a few clients at a time; buffers as in `weighted_mean`.

    Double precision makes the sums independent of the number of clients at a time.
    """
    template = federation.parameter_split.model()
    together = max(1, TOGETHER // max(total_nbytes(template), 1))
    parts = torch.arange(federation.num_clients).split(together)
    means = []
    for part in parts:
        models = personal_models(federation, part)
        doubled = {k: v.double() if v.is_floating_point() else v for k, v in models.items()}
        means.append(
            weighted_mean(doubled, torch.full((len(part),), 1 / len(part), dtype=torch.float64))
        )
    shares = torch.tensor([len(part) for part in parts]).double() / federation.num_clients
    stacked = {name: torch.stack([mean[name] for mean in means]) for name in means[0]}
    mean: Model = weighted_mean(stacked, shares)
    return {name: leaf.to(template[name].dtype) for name, leaf in mean.items()}
