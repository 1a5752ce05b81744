"""FedDF: federated averaging whose server distils the clients' ensemble into the mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Adam, Optimizer

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_integer, check_number, check_used
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree
from lightning_pfl.methods.base import About, LocalStep, Method, PerClient, Phase, Weighting
from lightning_pfl.methods.support import distillation


class FedDF(Method):
    r"""Average the models as FedAvg, and fit the mean to the ensemble's outputs on public samples.

    .. math::
        x \leftarrow \sum_{k \in S_t} p_k y_k, \qquad
        x \leftarrow \text{Adam on } T^2 \operatorname{KL}\!\Big(\operatorname{softmax}
        \Big(\tfrac1{|S_t|} \sum_k f_{y_k}(X) / T\Big) \,\Big\|\, \operatorname{softmax}(f_x(X) / T)
        \Big)

    Only the server has the public samples :math:`X`, whose labels aren't used. Its steps are on
    minibatches of all of them, shuffled anew in each pass.

    Args:
        server_steps: Adam's steps in each round, >= 0. 0 is FedAvg.
        server_lr: Adam's learning rate, > 0, which falls to 0 on a half cosine in each round.
        temperature: :math:`T > 0`.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"``: :math:`p_k = N_k / \sum N_j`; ``"uniform"``.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: In the first round, without public samples, or for clients of
            several architectures.

    State:
        server: ``model``. Clients have none.

    Deviation from the paper: a fixed number of steps, instead of stopping on validation data; one
    architecture. BatchNorm takes public samples' statistics while the server trains.

    Example:
        >>> FedDF(server_steps=100).server_phases(0)[0].steps
        100

    References:
        Lin, Kong, Stich, Jaggi. Ensemble distillation for robust model fusion in federated
        learning. NeurIPS 2020. arXiv:2006.07242, Algorithm 1.
    """

    about = About(
        family="one model for all",
        personal="nothing",
        assumes="one model suits all; the server has public samples",
        down="$4d$",
        up="$4d$",
        keeps="nothing",
        gradients="1; the server's on public samples, and a forward pass of each client's model",
        personal_model="the global model",
        global_model="the server's",
        paper="Lin et al. 2020",
    )
    needs_public_data: ClassVar[bool] = True

    def __init__(
        self,
        server_steps: int = 500,
        server_lr: float = 1e-3,
        temperature: float = 1.0,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_integer("server_steps", server_steps, 0, "Use 0 for FedAvg.")
        check_number("server_lr", server_lr, "Use 1e-3, for example.", positive=True)
        check_number("temperature", temperature, "Use 1, for example.", positive=True)
        given = {"server_lr": server_lr, "temperature": temperature}
        check_used(FedDF.__init__, given, server_steps > 0, "server_steps=1 or more")
        self.server_steps, self.server_lr = server_steps, server_lr
        self.temperature = temperature

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line without distillation."""
        return [] if self.server_steps else ["server_steps=0 makes FedDF FedAvg."]

    # --- the server's training ---

    def server_phases(self, round: int) -> tuple[Phase, ...]:
        """Train on public samples."""
        if not self.server_steps:
            return ()
        return (Phase("all", steps=self.server_steps, name="distil", data="public"),)

    def server_optimizers(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Make Adam."""
        return Adam(parameters, self.server_lr)

    def server_schedule(self, steps: int) -> list[float]:
        """Let the rate fall on a half cosine."""
        return distillation.cosine(steps)

    def server_init(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Begin at the mean, with the clients' models as teachers."""
        return distillation.begin(server["model"], uploads["model"])

    def server_step(self, state: Tree, minibatches: Any, server: LocalStep) -> Tree:
        """Step towards the teachers' mean outputs."""
        return distillation.step(state, minibatches, server, self.temperature)

    def server_final(self, server: Tree, state: Tree) -> Tree:
        """Return the trained model."""
        return {**server, "model": state["model"]}
