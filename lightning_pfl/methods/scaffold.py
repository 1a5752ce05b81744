"""SCAFFOLD: federated averaging with control variates against client drift."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_choice, check_number
from lightning_pfl.core.tree import (
    Model,
    Tree,
    add,
    expand,
    per_client,
    select,
    sub,
    tmap,
    weighted_mean,
    weighted_sum,
)
from lightning_pfl.methods.base import About, LocalStep, Method, PerClient, Phase, recordable
from lightning_pfl.methods.support.mean_gradient import collect, mean_gradient, no_gradients
from lightning_pfl.solvers.proximal import towards

Option = Literal["I", "II"]


class SCAFFOLD(Method):
    r"""Federated averaging whose steps are corrected by the difference of two control variates.

    :math:`c_k` estimates the gradient of client :math:`k`, :math:`c` that of all clients; both
    start at 0, and :math:`c_k` persists while the client is not sampled.

    .. math::
        y &\leftarrow y - \eta\,(g_k(y) - c_k + c), \quad K \text{ times from } y = x \\
        c_k^+ &= g_k(x) \;\text{(option I)} \quad\text{or}\quad c_k - c + \frac{x - y}{K\eta}
        \;\text{(option II)} \\
        x &\leftarrow x + \eta_g \frac{1}{|S_t|} \sum_{k \in S_t} (y_k - x), \qquad
        c \leftarrow c + \frac{1}{n} \sum_{k \in S_t} (c_k^+ - c_k)

    Dividing by the number :math:`n` of all clients with training data keeps :math:`c` the mean of
    their :math:`c_k`. Where clients leave a run that goes on from a checkpoint, :math:`n` counts
    those that stay, and :math:`c` keeps the difference that it then has from the mean of their
    :math:`c_k`, so that the run doesn't go to the optimum of theirs.
    Float buffers (BatchNorm statistics) are averaged, and have no control variates.

    Args:
        option: ``"I"``: the gradient at the received model, by another pass over the client's data;
            ``"II"``: the steps' own gradients.
        server_lr: :math:`\eta_g > 0`.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead (:math:`K`). Exactly one of the two.

    State:
        server: ``model``, and ``control``, the :math:`c`. client_state: ``control``, the
        :math:`c_k` of all trainable parameters, each leaf ``(clients, *shape)``.

    Deviation from the paper: option II takes the mean of the steps' gradients :math:`g_k(y)`. For
    plain SGD this equals the formula above; with momentum, weight decay or clipping the formula is
    biased and the mean isn't. Averages are uniform, as in the paper. With
    ``accumulate_grad_batches`` option I weights an incomplete last step of the pass too little.

    Example:
        >>> SCAFFOLD(option="I", local_steps=10).option
        'I'

    References:
        Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: stochastic controlled averaging
        for federated learning. ICML 2020. arXiv:1910.06378, Algorithm 1.
    """

    about = About(
        family="one model for all",
        personal="nothing; control variates against client drift",
        assumes=(
            "one model suits all; clients drift, and come back often, as their control "
            "variates go stale"
        ),
        down="$8d$",
        up="$8d$",
        keeps="$d$ numbers",
        gradients="1",
        personal_model="the global model",
        global_model="the server's",
        paper="Karimireddy et al. 2020",
    )

    training_state: ClassVar[tuple[str, ...]] = ("control",)

    def __init__(
        self,
        option: Option = "II",
        server_lr: float = 1.0,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        advice = "Use 'II', which needs no further pass over the data."
        check_choice("option", option, get_args(Option), advice)
        advice = "Use 1 to replace the model by the clients' mean."
        check_number("server_lr", server_lr, advice, positive=True)
        self.option, self.server_lr = option, server_lr

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Train locally; for option I add a pass that computes the gradient at ``x``."""
        local = Phase("all", epochs=self.local_epochs, steps=self.local_steps)
        return (local, Phase("all", epochs=1, name="control")) if self.option == "I" else (local,)

    def init_server(self, model: Model) -> Tree:
        """Return the global model and a control variate of zeros."""
        return {"model": model, "control": self._zeros(model)}

    def init_client_state(self, model: Model) -> Tree:
        """Return a control variate of zeros."""
        return {"control": self._zeros(model)}

    def admit(self, server: Tree, begun: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        """Give clients that join the global control variate, which stays the mean of all."""
        count = len(next(iter(client_state["control"].values())))
        return server, {"control": expand(server["control"], count)}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the global model and the global control variate."""
        return {"model": server["model"], "control": server["control"]}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start at the received model, with the correction ``c - c_k`` for the round."""
        control = client_state["control"]
        start = {"start": received["model"]} if self.option == "I" else {}
        return {
            "model": dict(received["model"]),
            **start,
            "correction": sub(received["control"], control),
            **no_gradients(control, info),
        }

    @recordable("option")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Take a corrected step, or compute the gradient at the received model."""
        if client.phase == "control":
            # A copy of the dict, as the pass must not write to the received buffers.
            grads = client.grad(dict(state["start"]), minibatches)
            _, real = client.samples(minibatches)
            return collect(state, grads, real.sum(1).to(state["count"]))
        grads = client.grad(state["model"], minibatches)
        if self.option == "II":
            state = collect(state, grads)
        corrected = add(grads, state["correction"])
        return {**state, "model": client.update(state["model"], corrected)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the model and the change of the control variate."""
        control, count = client_state["control"], state["count"]
        mean = mean_gradient(state)
        # A client without a step has no gradient, a mean of 0, and keeps its control variate. To
        # look for one takes less than to read all of them; only a host needn't wait for that.
        idle = (count == 0).to(count)
        if count.device.type != "cpu" or idle.any():
            mean = tmap(lambda new, old: new.addcmul_(old, per_client(idle, old)), mean, control)
        upload = {"model": state["model"], "control_change": sub(mean, control)}
        return upload, {"control": mean}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Move the model by the mean change, the control variate by the sum over n."""
        mean = weighted_mean(uploads["model"], info.weights)
        moved = towards(
            select(server["model"], self.parameter_split.trainable), mean, self.server_lr
        )
        count = int(self.has_training_data.sum())
        each = torch.full((len(info),), 1 / count, dtype=torch.float64)
        change = weighted_sum(uploads["control_change"], each)
        return {"model": {**mean, **moved}, "control": add(server["control"], change)}

    def _zeros(self, model: Model) -> Model:
        return tmap(torch.zeros_like, select(model, self.parameter_split.trainable))
