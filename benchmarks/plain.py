"""A careful plain-PyTorch loop over clients for ten methods, the baseline of the table.

It does what a good programmer does without batching over clients: data in memory as tensors, no
DataLoader, one module that every client trains in turn, torch's fused SGD, whole-model operations
by ``torch._foreach_*``, no ``.item()`` while training, and nothing of Lightning. Cohorts and orders
of samples are those of the package, so that both end with the same model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workloads import Workload
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.engine.orders import CohortOrders
from lightning_pfl.federation.sampling import sample_cohort

Weights = list[Tensor]
DITTO, PROX, PFEDME, INNER_RATE, INNER_STEPS, VARIANCE = 1.0, 0.1, 15.0, 0.05, 5, 15.0
"""The methods' settings: the package's defaults."""


class PlainLoop:
    """The baseline: its one module, and the state of server and clients.

    Args:
        workload: What trains.
        train: Training data.
        test: Test data.
        model: The initial parameters and buffers.
        method: A key of :data:`METHODS`.
        seed: The run's seed.
        device: Where models and samples lie.
        onednn: Whether torch may use oneDNN, its default; small batches can be faster without.

    Attributes:
        server: The server's parameters and buffers, in the order of ``names``.
    """

    def __init__(
        self,
        workload: Workload,
        train: FederatedTensorDataset,
        test: FederatedTensorDataset,
        model: dict[str, Tensor],
        method: str,
        seed: int = 0,
        device: torch.device | str = "cpu",
        onednn: bool = True,
    ) -> None:
        self.workload, self.train, self.onednn = workload, train, onednn
        self.seed, self.number, self.device = seed, 0, torch.device(device)
        self.fields, self.positions = self._placed(train)
        self.test_fields, self.test_positions = self._placed(test)
        self.module, self.second = workload.module().to(device), workload.module().to(device)
        self.module.load_state_dict(model)
        self.names = list(model)
        self.server = [leaf.clone().to(device) for leaf in model.values()]
        self.leaves, self.others = _leaves(self.module), _leaves(self.second)
        self.trained = [name in dict(self.module.named_parameters()) for name in self.names]
        self.personal: dict[int, Weights] = {}
        self.initial = [leaf.clone() for leaf in self.server]
        self.control = [torch.zeros_like(leaf) for leaf in self._parameters(self.server)]
        self.controls: dict[int, Weights] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self.method, self._round = method, METHODS[method]

    def run_round(self) -> None:
        """Train the cohort, update the server, and evaluate every client."""
        clients = torch.arange(self.workload.clients)
        cohort = sample_cohort(self.seed, self.number, clients, self.workload.cohort).tolist()
        self._draw_orders(cohort)
        self.module.train()
        self.second.train()
        with use_onednn(self.onednn):
            self._round(self, cohort)
            self.number += 1
            self.evaluate()

    # --- methods ---

    def fedavg(self, cohort: list[int]) -> None:
        """Average the clients' models, weighted by samples."""
        self.server = _mean(self._train_from(cohort, self._shared), self._samples(cohort))

    def fedprox(self, cohort: list[int]) -> None:
        """Average models that are held near the server's."""
        anchor = self._parameters(self.server)
        uploads = []
        for client in cohort:
            self._load(self.leaves, self.server)
            optimizer, own = self._optimizer(self.module), self._parameters(self.leaves)
            for inputs, labels in self._epoch(client, 0):
                optimizer.zero_grad()
                F.cross_entropy(self.module(inputs), labels).backward()
                pull = torch._foreach_sub(_data(own), anchor)
                torch._foreach_add_(_grads(own), pull, alpha=PROX)
                optimizer.step()
            uploads.append(_copy(self.leaves))
        self.server = _mean(uploads, self._samples(cohort))

    def local(self, cohort: list[int]) -> None:
        """Train every client alone, whoever was drawn."""
        everyone = list(range(self.workload.clients))
        self._draw_orders(everyone)
        self._keep(everyone, self._train_from(everyone, self._own))

    def fedper(self, cohort: list[int]) -> None:
        """Train body and head together, and average the body."""
        uploads = self._train_from(cohort, self._evaluated)
        self._keep(cohort, uploads)
        self.server = _mean(uploads, self._samples(cohort))

    def lg_fedavg(self, cohort: list[int]) -> None:
        """Train body and head together, and average the head."""
        uploads = self._train_from(cohort, self._evaluated)
        self._keep(cohort, uploads)
        self.server = _mean(uploads, [1] * len(cohort))

    def _train_from(self, cohort: list[int], start: Callable[[int], Weights]) -> list[Weights]:
        """Train models of clients for an epoch."""
        uploads = []
        for client in cohort:
            self._load(self.leaves, start(client))
            optimizer = self._optimizer(self.module)
            for inputs, labels in self._epoch(client, 0):
                _step(optimizer, self.module(inputs), labels)
            uploads.append(_copy(self.leaves))
        return uploads

    def _keep(self, clients: list[int], models: list[Weights]) -> None:
        self.personal |= dict(zip(clients, models, strict=True))

    def _shared(self, client: int) -> Weights:
        return self.server

    def _own(self, client: int) -> Weights:
        return self.personal.get(client, self.initial)

    def fedrep(self, cohort: list[int], cached: bool = False) -> None:
        """Train the head on the frozen body, then the body; average the body."""
        module: Any = self.module
        body, head = module.backbone, module.head
        uploads = []
        for client in cohort:
            self._load(self.leaves, self._with_head(self._own(client)))
            body.eval()
            optimizer = self._optimizer(head)
            images, labels = self._all(client)
            with torch.no_grad():
                features = body(images) if cached else None
            for epoch in range(self.workload.head_epochs):
                for rows in self._order(client, epoch):
                    with torch.no_grad():
                        inputs = body(images[rows]) if features is None else features[rows]
                    _step(optimizer, head(inputs), labels[rows])
            if list(body.parameters()):
                body.train()
                head.requires_grad_(False)
                optimizer = self._optimizer(body)
                for inputs, targets in self._epoch(client, self.workload.head_epochs):
                    _step(optimizer, self.module(inputs), targets)
                head.requires_grad_(True)
            uploads.append(_copy(self.leaves))
            self.personal[client] = uploads[-1]
        self.server = _mean(uploads, self._samples(cohort))

    def fedrep_cached(self, cohort: list[int]) -> None:
        """Run FedRep with the frozen body's features computed once for each client."""
        self.fedrep(cohort, cached=True)

    def ditto(self, cohort: list[int]) -> None:
        """Train the global model and a personal one near it, on the same minibatches."""
        uploads = []
        anchor = self._parameters(self.server)
        for client in cohort:
            self._load(self.leaves, self.server)
            self._load(self.others, self.personal.get(client, self.initial))
            ours, theirs = self._optimizer(self.module), self._optimizer(self.second)
            own = self._parameters(self.others)
            for inputs, labels in self._epoch(client, 0):
                _step(ours, self.module(inputs), labels)
                theirs.zero_grad()
                F.cross_entropy(self.second(inputs), labels).backward()
                grads = _grads(own)
                torch._foreach_add_(grads, torch._foreach_sub(_data(own), anchor), alpha=DITTO)
                theirs.step()
            uploads.append(_copy(self.leaves))
            self.personal[client] = _copy(self.others)
        self.server = _mean(uploads, [1] * len(cohort))

    def fedmap(self, cohort: list[int]) -> None:
        """Train each client's model under a Gaussian prior, whose mean is a weighted mean."""
        center = self._parameters(self.server)
        uploads, weights = [], []
        for client in cohort:
            self._load(self.leaves, self.personal.get(client, self.server))
            optimizer = self._optimizer(self.module)
            own = self._parameters(self.leaves)
            for inputs, labels in self._epoch(client, 0):
                optimizer.zero_grad()
                F.cross_entropy(self.module(inputs), labels).backward()
                pull = torch._foreach_sub(_data(own), center)
                torch._foreach_add_(_grads(own), pull, alpha=1 / VARIANCE)
                optimizer.step()
            uploads.append(_copy(self.leaves))
            self.personal[client] = uploads[-1]
            weights.append(-self._measured(client) - self._penalty(own, center))
        share = torch.stack(weights).softmax(0)
        mean = _mean(uploads, share.tolist())
        # Buffers stay with the clients.
        kept = zip(mean, self.server, self.trained, strict=True)
        self.server = [new if trained else old for new, old, trained in kept]

    def _measured(self, client: int) -> Tensor:
        """Compute the mean loss of a client's training samples."""
        self.module.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for inputs, labels in self._epoch(client, 1):
                loss = F.cross_entropy(self.module(inputs), labels, reduction="sum")
                total += loss
        self.module.train()
        return total / int(self.train.num_samples[client])

    def _penalty(self, own: Weights, center: Weights) -> Tensor:
        apart = torch._foreach_norm(torch._foreach_sub(_data(own), center))
        return torch.stack(list(apart)).square().sum().double() / (2 * VARIANCE)

    def pfedme(self, cohort: list[int]) -> None:
        """Approach the minimiser near the model, and step the model towards it."""
        uploads = []
        at_first = self._parameters(self.server)
        for client in cohort:
            self._load(self.leaves, self.server)
            theta = self._parameters(self.leaves)
            model = [leaf.detach().clone().requires_grad_() for leaf in at_first]
            optimizer = self._optimizer(self.module, model)
            for inputs, labels in self._epoch(client, 0):
                for _ in range(INNER_STEPS):
                    self.module.zero_grad()
                    F.cross_entropy(self.module(inputs), labels).backward()
                    now = _data(theta)
                    grads = _grads(theta)
                    apart = torch._foreach_sub(now, _data(model))
                    torch._foreach_add_(grads, apart, alpha=PFEDME)
                    torch._foreach_add_(now, grads, alpha=-INNER_RATE)
                difference = torch._foreach_sub(_data(model), _data(theta))
                torch._foreach_mul_(difference, PFEDME)
                for leaf, grad in zip(model, difference, strict=True):
                    leaf.grad = grad
                optimizer.step()
            self.personal[client] = _copy(self.leaves)
            found = iter(_data(model))
            uploads.append(
                [
                    next(found) if trained else leaf
                    for leaf, trained in zip(self.personal[client], self.trained, strict=True)
                ]
            )
        self.server = _mean(uploads, [1] * len(cohort))

    def scaffold(self, cohort: list[int]) -> None:
        """Correct every step by the difference of two control variates (option II)."""
        uploads = []
        change = [torch.zeros_like(leaf) for leaf in self.control]
        nothing = [torch.zeros_like(leaf) for leaf in self.control]
        for client in cohort:
            self._load(self.leaves, self.server)
            optimizer = self._optimizer(self.module)
            own = self._parameters(self.leaves)
            old = self.controls.get(client, nothing)
            correction = torch._foreach_sub(self.control, old)
            total, steps = [torch.zeros_like(leaf) for leaf in own], 0
            for inputs, labels in self._epoch(client, 0):
                optimizer.zero_grad()
                F.cross_entropy(self.module(inputs), labels).backward()
                grads = _grads(own)
                torch._foreach_add_(total, grads)
                torch._foreach_add_(grads, correction)
                optimizer.step()
                steps += 1
            torch._foreach_div_(total, steps)
            torch._foreach_add_(change, torch._foreach_sub(total, old))
            self.controls[client] = total
            uploads.append(_copy(self.leaves))
        self.server = _mean(uploads, [1] * len(cohort))
        torch._foreach_add_(self.control, change, alpha=1 / self.workload.clients)

    # --- evaluation ---

    @torch.inference_mode()
    def evaluate(self) -> float:
        """Evaluate each client's model, and the global one where both exist; return a mean."""
        self.module.eval()
        hits = []
        if self.method not in WITHOUT_GLOBAL:
            self._load(self.leaves, self.server)
            hits = [self._accuracy(client) for client in range(self.workload.clients)]
        if self.personal:
            hits = [self._personal_accuracy(client) for client in range(self.workload.clients)]
        return float(torch.stack(hits).mean())

    def _personal_accuracy(self, client: int) -> Tensor:
        self._load(self.leaves, self._evaluated(client))
        return self._accuracy(client)

    def _accuracy(self, client: int) -> Tensor:
        positions = self.test_positions[client]
        inputs, labels = (field[positions] for field in self.test_fields)
        output: Tensor = self.module(inputs)
        F.cross_entropy(output, labels)
        hits: Tensor = output.argmax(1) == labels
        return hits.float().mean()

    def _evaluated(self, client: int) -> Weights:
        """Return a client's personal model, or what stands for it before its first round."""
        if self.method in ("FedRep", "FedRep, cached", "FedPer"):
            return self._with_head(self._own(client))
        if self.method == "LGFedAvg":
            return self._with_head(self.server, self._own(client))
        unseen = self.server if self.method == "FedMAP" else self.initial
        return self.personal.get(client, unseen)

    def personal_model(self, client: int) -> dict[str, Tensor]:
        """Return the model that a client is evaluated with, by name."""
        own = self._evaluated(client) if self.personal else self.server
        return dict(zip(self.names, own, strict=True))

    def _with_head(self, head: Weights, body: Weights | None = None) -> Weights:
        """Put the head of a model on the body of another, by default the server's."""
        top = [name.startswith("head") for name in self.names]
        pairs = zip(head, self.server if body is None else body, top, strict=True)
        return [one if above else other for one, other, above in pairs]

    # --- parts ---

    def _placed(self, data: FederatedTensorDataset) -> tuple[list[Tensor], list[Tensor]]:
        """Put all samples, and the positions of each client's, on the device once."""
        fields = [field.to(self.device) for field in data.fields]
        return fields, [positions.to(self.device) for positions in data.indices]

    def _parameters(self, leaves: Weights) -> Weights:
        return [leaf for leaf, trained in zip(leaves, self.trained, strict=True) if trained]

    def _samples(self, cohort: list[int]) -> list[float]:
        return [float(self.train.num_samples[client]) for client in cohort]

    def _optimizer(
        self, part: torch.nn.Module, leaves: Weights | None = None
    ) -> torch.optim.Optimizer:
        """Return the module's SGD on a part of it, without momentum from the last client."""
        if id(part) not in self._optimizers or leaves is not None:
            module = self.second if part is self.second else self.module
            made: Any = module.configure_optimizers()
            options: dict[int, dict[str, Any]] = {}
            for group in made.param_groups:
                settings = {k: v for k, v in group.items() if k != "params"}
                options |= {id(p): settings for p in group["params"]}
            mine = list(part.parameters())
            groups: list[dict[str, Any]] = []
            for p, leaf in zip(mine, leaves or mine, strict=True):
                decay = options[id(p)]["weight_decay"]
                same = [group for group in groups if group["weight_decay"] == decay]
                if same:
                    same[0]["params"].append(leaf)
                else:
                    groups.append({"params": [leaf], "weight_decay": decay})
            first = made.param_groups[0]
            self._optimizers[id(part)] = torch.optim.SGD(
                groups, lr=first["lr"], momentum=first["momentum"], fused=True
            )
        optimizer = self._optimizers[id(part)]
        optimizer.state.clear()
        return optimizer

    @torch.no_grad()
    def _load(self, leaves: Weights, values: Weights) -> None:
        torch._foreach_copy_(_data(leaves), values)

    def _all(self, client: int) -> tuple[Tensor, Tensor]:
        at = self.positions[client]
        return self.fields[0][at], self.fields[1][at]

    def _draw_orders(self, clients: list[int]) -> None:
        self.orders = CohortOrders(self.train, clients, self.seed, "local", self.number)

    def _order(self, client: int, epoch: int) -> Iterator[Tensor]:
        order = self.orders.of(client, epoch).to(self.device)
        yield from torch.split(order, self.workload.batch_size)

    def _epoch(self, client: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        positions = self.positions[client]
        inputs, labels = self.fields
        for rows in self._order(client, epoch):
            at = positions[rows]
            yield inputs[at], labels[at]


def _leaves(module: torch.nn.Module) -> Weights:
    return list(module.state_dict(keep_vars=True).values())


def _data(leaves: Weights) -> Weights:
    return [leaf.detach() for leaf in leaves]


def _grads(leaves: Weights) -> Weights:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _copy(leaves: Weights) -> Weights:
    return [leaf.detach().clone() for leaf in leaves]


def _step(optimizer: torch.optim.Optimizer, output: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(output, labels).backward()
    optimizer.step()


def _mean(uploads: list[Weights], weights: list[float]) -> Weights:
    """Average float leaves by weight; take the maximum of others."""
    share = torch.tensor(weights, dtype=torch.float64)
    share = (share / share.sum()).to(uploads[0][0])
    return [
        torch.tensordot(share, torch.stack(leaves), 1)
        if leaves[0].is_floating_point()
        else torch.stack(leaves).amax(0)
        for leaves in zip(*uploads, strict=True)
    ]


@contextmanager
def use_onednn(enabled: bool) -> Iterator[None]:
    """Allow torch oneDNN or not; `mkldnn.flags()` would also set a flag of other hardware."""
    backend: Any = torch.backends.mkldnn
    before = backend.enabled
    backend.enabled = before and enabled
    try:
        yield
    finally:
        backend.enabled = before


WITHOUT_GLOBAL = ("FedRep", "FedRep, cached", "FedPer", "LGFedAvg", "LocalOnly")
"""Methods without a global model to evaluate."""
METHODS: dict[str, Callable[[PlainLoop, list[int]], None]] = {
    "FedAvg": PlainLoop.fedavg,
    "FedProx": PlainLoop.fedprox,
    "LocalOnly": PlainLoop.local,
    "FedPer": PlainLoop.fedper,
    "LGFedAvg": PlainLoop.lg_fedavg,
    "FedRep": PlainLoop.fedrep,
    "FedRep, cached": PlainLoop.fedrep_cached,
    "Ditto": PlainLoop.ditto,
    "FedMAP": PlainLoop.fedmap,
    "PFedMe": PlainLoop.pfedme,
    "SCAFFOLD": PlainLoop.scaffold,
}
