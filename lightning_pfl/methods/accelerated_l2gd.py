"""AcceleratedL2GD: L2GD's objective by proximal gradient steps with momentum, without a coin."""

from __future__ import annotations

from typing import ClassVar

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_number, is_number
from lightning_pfl.core.tree import Model, Tree, select, weighted_mean
from lightning_pfl.methods.base import PER_CLIENT, About, Method, PerClient
from lightning_pfl.solvers.proximal import towards


class AcceleratedL2GD(Method):
    r"""Every client has a model, penalised by its distance to their mean, with momentum.

    Minimises :math:`\frac1n \sum_i F_i(x_i) + \frac{\lambda}{2n} \sum_i \lVert x_i - \bar x
    \rVert^2`. In each round, with the mean :math:`\bar z` of the points :math:`z_i` that the last
    cohort has sent:

    .. math::
        x_i^+ &= \frac{z_i + \eta\lambda\, \bar z}{1 + \eta\lambda}, \qquad
        y_i = x_i^+ + \beta\, (x_i^+ - x_i) \\
        z_i &\leftarrow y_i - \eta\, \nabla F_i(y_i), \qquad x_i \leftarrow x_i^+

    The first line is the proximal map of the penalty, which keeps the mean; :math:`\eta` is the
    learning rate of the user's optimizer. With curvatures of the losses from :math:`\mu` to
    :math:`L` and :math:`\eta = 1/L`, the best momentum is :math:`(\sqrt L - \sqrt\mu) / (\sqrt L +
    \sqrt\mu)`, and the error shrinks by :math:`1 - \sqrt{\mu/L}` per round.

    Args:
        mixing_weight: :math:`\lambda \ge 0`. 0 trains every client alone.
        momentum: :math:`\beta` in [0, 1). 0 is without acceleration.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps instead. Exactly one of the two; 1 is the paper's. :math:`K`
            steps act like a mixing weight :math:`K` times smaller.

    State:
        server: ``point``, :math:`\bar z` of the trainable parameters. client_state: ``model``,
        :math:`x_i` with its buffers, and ``point``, :math:`z_i`; each leaf ``(clients, *shape)``.

    Deviation from the paper: minibatches; with partial participation the mean is that of the last
    cohort. A client is evaluated with its :math:`x_i` of its last round.

    Example:
        >>> AcceleratedL2GD(mixing_weight=1.0, momentum=0.5).local_steps
        1

    References:
        Hanzely, Hanzely, Horváth, Richtárik. Lower bounds and optimal algorithms for personalized
        federated learning. NeurIPS 2020. arXiv:2010.02372, APGD1.
    """

    about = About(
        family="a personal model",
        personal="everything; pulled to the mean in every round, with momentum",
        assumes="models lie near their mean",
        down="$4d$",
        up="$4d$",
        keeps="2 models",
        gradients="1",
        personal_model="the client's own model, of the beginning of its last round",
        global_model=None,
        paper="Hanzely et al. 2020",
    )
    model_scope: ClassVar[str] = PER_CLIENT

    def __init__(
        self,
        mixing_weight: float = 0.5,
        momentum: float = 0.5,
        local_epochs: PerClient | None = None,
        local_steps: PerClient | None = 1,
    ) -> None:
        # `local_epochs=1` alone means epochs instead of the default step, not both.
        local_steps = None if local_epochs is not None and local_steps == 1 else local_steps
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_number("mixing_weight", mixing_weight, "Use 0 to train every client alone.")
        if not is_number(momentum) or not 0 <= momentum < 1:
            raise ValueError(
                f"Expected `momentum` to be in [0, 1), but got momentum={momentum!r}. Use 0 for "
                "none, or 0.5."
            )
        self.mixing_weight, self.momentum = mixing_weight, momentum

    def init_server(self, model: Model) -> Tree:
        """Return the mean of equal points."""
        return {"point": select(model, self.parameter_split.trainable)}

    def init_client_state(self, model: Model) -> Tree:
        """Begin at the initial model."""
        return {"model": model, "point": select(model, self.parameter_split.trainable)}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the mean point."""
        return dict(server)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Go towards the mean, and on by the momentum."""
        model, strength = client_state["model"], info.lr * self.mixing_weight
        share = strength / (1 + strength)
        near = towards(client_state["point"], received["point"], share)
        ahead = towards(near, model, -self.momentum)
        return {"model": {**model, **ahead}, "near": near}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send and keep the point after the step."""
        model, near = state["model"], state["near"]
        point = select(model, near)
        return {"point": point}, {"model": {**model, **near}, "point": point}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average the points."""
        return weighted_mean(uploads, info.weights)
