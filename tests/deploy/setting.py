"""A small federation on the digits, simulated and deployed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.cli import PFLCLI
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import Round
from lightning_pfl.core.tree import Tree, leaves, rows
from lightning_pfl.deploy.loop import LoopLine
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.remote import ServerFederation
from lightning_pfl.deploy.server import serve
from lightning_pfl.deploy.wire import flatten

METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedRep": {"head_epochs": 2},
    "FedMAP": {},
    "SCAFFOLD": {},
    "Ditto": {},
    "APFL": {},
    "PFedMe": {"inner_lr": 0.05},
    "IFCA": {"num_clusters": 2},
    "ConvexClustering": {"fusion_weight": 0.1},
    "FedU": {"graph": "ring"},
}
"""The methods that run over a real network, and what they need beside their defaults."""
NEEDED: dict[str, dict[str, Any]] = {
    "ClusterOracle": {"clusters": [0, 1, 0, 1, 0, 1]},
    "HeteroFL": {
        "narrow": {
            "half": {"class_path": "lightning_pfl.models.MLP", "init_args": {"sizes": [64, 4, 10]}}
        }
    },
}
"""The same of other methods."""
SIZES = {"MOCHA": [64, 10]}
"""Layers of the model, where the method is for linear ones."""
CLIENTS = 6
HOMES = [["0", "3"], ["1", "4"], ["2", "5"]]
"""Three nodes of two clients each."""


def recipe_of(
    method: str, rounds: int = 5, participation: float = 0.5, clients: int = CLIENTS, **trainer: Any
) -> dict[str, Any]:
    """Write a recipe as plain values."""
    partition = {"class_path": "ClassesPerClient", "init_args": {"classes_per_client": 5}}
    return {
        "seed_everything": 3,
        "method": {"class_path": method, "init_args": (METHODS | NEEDED).get(method, {})},
        "model": {
            "class_path": "MLP",
            "init_args": {"sizes": SIZES.get(method, [64, 8, 10]), "lr": 0.05},
        },
        "data": {
            "class_path": "FederatedDataModule",
            "init_args": {
                "source": {"class_path": "Digits"},
                "partition": partition,
                "num_clients": clients,
                "val_fraction": 0.2,
                "batch_size": 32,
            },
        },
        "trainer": {
            "max_epochs": rounds,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "strategy": {
                "class_path": "FederatedStrategy",
                "init_args": {"participation": participation, "engine": "sequential"},
            },
            **trainer,
        },
    }


class LeftOut(FederatedCallback):
    """Spoils uploads of a simulation, so that the gate leaves clients out as if they were away.

    Args:
        rounds: In which rounds.
        clients: Whose.
    """

    def __init__(self, rounds: Sequence[int], clients: Sequence[str]) -> None:
        self.rounds, self.clients = rounds, clients

    def on_local_training_end(self, trainer: Any, module: Any, round: Round) -> None:
        gone = torch.tensor([str(k) in self.clients for k in round.info.index.tolist()])
        if round.number in self.rounds and round.uploads is not None:
            for leaf in leaves(round.uploads):
                leaf[gone] = torch.nan


def simulate(recipe: dict[str, Any], folder: Path, callbacks: tuple[Any, ...] = ()) -> Any:
    """Run a recipe in this process; returns its Trainer."""
    settings = copy.deepcopy(recipe)
    settings["trainer"] |= {"enable_checkpointing": False, "default_root_dir": str(folder)}
    cli = PFLCLI(settings, run=False, save_config_callback=None, extra_callbacks=callbacks)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.trainer


def make_nodes(
    recipe: dict[str, Any], folder: Path, homes: list[list[str]] = HOMES
) -> dict[int, Node]:
    """Make the nodes of a deployment, by their numbers."""
    return {100 + i: Node(recipe, folder / f"node{i}", home) for i, home in enumerate(homes)}


def deploy(
    recipe: dict[str, Any], folder: Path, line: LoopLine | None = None, timeout: float = 60
) -> tuple[Any, LoopLine]:
    """Deploy a recipe inside this process; returns the server's Trainer and the network."""
    line = LoopLine(make_nodes(recipe, folder)) if line is None else line
    names = sorted(name for node in line.nodes.values() for name in node.clients)
    return serve(recipe, line, folder / "server", names, timeout=timeout, pause=0), line


def leaves_of(tree: Tree) -> dict[str, Tensor]:
    """Name the leaves of a tree by their paths."""
    return {path: leaf for path, leaf in flatten(tree, "") if leaf is not None}


def states_of(federation: ServerFederation, nodes: dict[int, Node]) -> Tree:
    """Read the client states that count from the nodes' disks, by the client's name."""
    found = {}
    for node in nodes.values():
        assert node.federation is not None
        for name in node.clients:
            client = federation.client_names.index(name)
            store = node.federation.states
            store.versions = {client: int(federation.versions[client])}
            found[name] = store.gather(torch.tensor([client]))
    return found


def differences(simulated: Any, deployed: ServerFederation, nodes: dict[int, Node]) -> list[str]:
    """Name the entries of server and client states that aren't equal bit by bit."""
    states = {
        name: rows(simulated.client_states.tree, slice(k, k + 1))
        for k, name in enumerate(simulated.client_names)
    }
    ours = leaves_of({"server": simulated.server, **states})
    theirs = leaves_of({"server": deployed.server, **states_of(deployed, nodes)})
    return [
        path
        for path in {**ours, **theirs}
        if path not in ours or path not in theirs or not torch.equal(ours[path], theirs[path])
    ]
