"""Local training outside of rounds, for personalization at test time."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_integer, is_number
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, tmap
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.base import LocalWork
from lightning_pfl.engine.watching import in_mode
from lightning_pfl.federation.architectures import one_architecture
from lightning_pfl.federation.state import FederationState
from lightning_pfl.methods.base import LocalStep, Method, Phase

Step = Callable[[Tree, Any, LocalStep], Tree]
"""One step on a batch, from a state to the next one.

Its entries are ``model``; ``samples``, the clients' numbers of them, ``(clients,)``; and ``given``,
what :func:`adapt` was given.
"""


class Adaptation(Method):
    """A method whose clients train given models and return them.

    Args:
        step: One step on a batch; None for the user's optimizer.
    """

    def __init__(self, step: Step | None) -> None:
        super().__init__(weighting="uniform")
        self.step = step or super().client_step

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start with the given model."""
        model: Model = received["model"]
        device = next(iter(model.values())).device
        samples = send(info.num_samples, device).double()
        return {"model": model, "samples": samples, "given": received["given"]}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Take one step."""
        return self.step(state, minibatches, client)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Return the model."""
        return {"model": state["model"]}, {}


def steps_of_new_clients(method: Method, server: Tree) -> Step:
    """Return the method's step of clients that never took part."""

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        model, samples = state["model"], state["samples"]
        moved = method.adaptation_step(server, model, minibatches, client, samples)
        return {**state, "model": moved}

    return step


def budget_phase(epochs: int | None, steps: int | None, default_epochs: int | None) -> Phase:
    """Require exactly one of ``epochs`` and ``steps``; ``steps`` alone replaces the default epochs.

    Returns:
        A phase of that length.

    Raises:
        ValueError: If both or neither are given, or one isn't an integer >= 0.
    """
    if steps is not None and epochs == default_epochs:
        epochs = None
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"Expected exactly one of `epochs` and `steps`, but got epochs={epochs!r}, "
            f"steps={steps!r}. Set the other one to None."
        )
    name, value = ("epochs", epochs) if steps is None else ("steps", steps)
    check_integer(name, value, 0, "Use 10, for example.")
    return Phase(epochs=epochs, steps=steps)


def check_lr(lr: float | None) -> None:
    """Raise ValueError unless the learning rate is positive or None."""
    if lr is not None and not (is_number(lr) and 0 < lr < math.inf):
        raise ValueError(
            f"Expected `lr` to be a finite number > 0 or None, but got lr={lr!r}. "
            "Use None for the learning rates of `configure_optimizers`."
        )


def adapt(
    federation: FederationState,
    models: Model,
    clients: Tensor,
    phases: tuple[Phase, ...],
    data: FederatedDataset | None = None,
    stream: str = "adaptation",
    step: Step | None = None,
    given: Tree | None = None,
) -> Model:
    """Train copies of models on the clients' training data, without changing the federation.

    Args:
        federation: The federation.
        models: One model per client, ``(clients, ...)``.
        clients: Ids, int64 ``(clients,)``; rows of ``data`` if that is given.
        phases: Phases of the training.
        data: Other data to train on; None for the training data.
        stream: Name of the random stream, so that several adaptations in a round draw different
            numbers.
        step: One step on a batch; None for the user's optimizer.
        given: What the step needs of each client, ``(clients, ...)``.

    Returns:
        The trained models, ``(clients, ...)``. A client without samples keeps its model.

    Raises:
        MisconfigurationException: If the Trainer has no training data.
    """
    federation.require_module()
    architecture = (
        federation.architecture_of(clients)
        if data is None
        else one_architecture(federation.architectures)
    )
    module, settings = architecture.module, federation.settings
    data = federation.training_data() if data is None else data
    home = next(module.parameters()).device
    method = Adaptation(step)
    if architecture.optimizer is None:
        architecture.optimizer = federation.client_optimizer(architecture)
    # Evaluation runs without gradients; after a run the module has left the device.
    with torch.inference_mode(False), torch.enable_grad(), in_mode(module, training=True):
        module.to(settings.device)
        received = tmap(
            lambda leaf: leaf.to(settings.device), {"model": models, "given": given or {}}
        )
        samples = data.num_samples[clients]
        steps = architecture.engine.count_steps(data, clients, phases)
        weights = method.aggregation_weights(samples)
        round = max(federation.rounds - 1, 0)
        info = ClientInfo(clients, samples, steps, weights, round, data.num_clients)
        # At the rates that schedules have reached: their steps are those of the rounds, of which
        # some end in an error where they go on.
        work = LocalWork(method, received, {}, info, data, phases, architecture.optimizer, stream)
        loop = architecture.engine.loop
        with nullcontext() if loop is None else loop.without_schedules():
            result = architecture.engine.train(work)
        module.to(home)
    trained: Model = tmap(lambda leaf: leaf.detach().to(home), result.uploads["model"])
    return trained
