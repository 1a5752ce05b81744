"""What people write in their modules and data sets, each by itself, on a small network.

FedAvg in turns with a loop that calls the same ``training_step`` and ``validation_step``: on the
same tensors, or by the same DataLoaders where data sets are users' own. In CPU time of one thread.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.cells import CHECKED_ROUNDS, SAME, InTurns, Splits, use_threads
from benchmarks.users import Row
from lightning_pfl import FederatedStrategy
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.engine.orders import CohortOrders
from lightning_pfl.federation.sampling import sample_cohort
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.fitting import quiet_trainer

CLIENTS, COHORT, BATCH, CLASSES = 40, 10, 20, 5
SIZES = {0.0: 112, 1.0: 80}
"""Samples of a client, or their median, by the deviation of their logarithms."""
SIGMAS = tuple(SIZES)
FIRST, LATER = 10, 12
"""Rounds from the first one on, with the probe and most recordings, and rounds after these."""


class Plain(L.LightningModule):
    """An MLP with steps of its own, SGD."""

    outputs = CLASSES

    def __init__(self) -> None:
        super().__init__()
        widths, layers = (20, 64, 64), list[nn.Module]()
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(64, self.outputs))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Regression(Plain):
    """A regression with Adam."""

    outputs = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        target = batch[1].to(batch[0].dtype)
        loss = F.mse_loss(self.net(batch[0]).squeeze(1), target)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the error."""
        target = batch[1].to(batch[0].dtype)
        self.log("val_mae", (self.net(batch[0]).squeeze(1) - target).abs().mean())

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Cosine(Regression):
    """A regression with AdamW, whose rate falls."""

    def configure_optimizers(self) -> Any:
        """Return AdamW and a schedule that counts epochs, which are rounds."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)]


class Counting(Plain):
    """SGD with momentum, whose rate falls with each step."""

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule that counts steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Weighted(Plain):
    """Weights of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        weight: Any = self.weights
        loss = F.cross_entropy(self.net(batch[0]), batch[1], weight=weight)
        self.log("train_loss", loss)
        return loss


class Groups(Plain):
    """AdamW with two groups of parameters."""

    def configure_optimizers(self) -> Any:
        """Return AdamW that decays weights alone."""
        biases = [one for one in self.parameters() if one.ndim == 1]
        others = [one for one in self.parameters() if one.ndim > 1]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)


class Named(Plain):
    """Minibatches that are dicts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("val_acc", (self.net(batch["x"]).argmax(1) == batch["y"]).float().mean())


class Epochs(Plain):
    """A loss that depends on the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1]) * 0.99**self.current_epoch
        self.log("train_loss", loss)
        return loss


class EpochsInValidation(Plain):
    """A validation that reads the epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        accuracy = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_acc", accuracy * 0.99**self.current_epoch)


class Listing(Plain):
    """A validation that keeps what it finds in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        accuracy = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.found.append(accuracy)
        self.log("val_acc", accuracy)

    def on_validation_epoch_end(self) -> None:
        """Empty the list."""
        self.found.clear()


class Samples(Dataset[Any]):
    """Samples that are dicts of a row each."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample."""
        return {"x": self.x[index], "y": self.y[index]}


class Numbers(Samples):
    """The same, with labels as numbers."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample."""
        return {"x": self.x[index], "y": int(self.y[index])}


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Make a minibatch of a list of samples."""
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


@dataclass(frozen=True)
class Habit:
    """What is measured.

    Attributes:
        about: What it is, for the table.
        module: The module.
        samples: The user's data set, if samples come from one.
        collate: By which they become minibatches, if it isn't torch's.
        flags: The Trainer's.
    """

    about: str
    module: type[Plain] = Plain
    samples: type[Samples] | None = None
    collate: Callable[[Any], Any] | None = None
    flags: dict[str, Any] = field(default_factory=dict)


HABITS = {
    "sgd": Habit("SGD"),
    "regression": Habit("regression, `mse_loss` with Adam", Regression),
    "cosine": Habit("the same with AdamW and `CosineAnnealingLR`", Cosine),
    "schedule": Habit("SGD with momentum and a schedule that counts steps", Counting),
    "weights": Habit("weights of classes", Weighted),
    "clipping": Habit("clipping by norm", flags={"gradient_clip_val": 0.3}),
    "groups": Habit("two groups of AdamW", Groups),
    "bf16": Habit('`precision="bf16-mixed"`', flags={"precision": "bf16-mixed"}),
    "accumulate": Habit("`accumulate_grad_batches=2`", flags={"accumulate_grad_batches": 2}),
    "dicts": Habit("dicts of a `Dataset` of one's own", Named, Samples),
    "collate": Habit("the same by a collate function", Named, Samples, stacked),
    "numbers": Habit("dicts whose labels are numbers, `int(self.y[i])`", Named, Numbers),
    "epoch": Habit("`self.current_epoch` in `training_step`", Epochs),
    "list": Habit("a list to which `validation_step` appends", Listing),
    "epoch in validation": Habit("`self.current_epoch` there", EpochsInValidation),
}  # fmt: skip
Batches = Callable[[int, int], Iterator[Any]]


class Source:
    """The samples of all clients.

    Args:
        habit: What is measured.
        sizes: Samples of each client.
        dtype: Of the samples.
        shuffle: Whether their order is drawn.
    """

    def __init__(
        self, habit: Habit, sizes: Sequence[int], dtype: torch.dtype, shuffle: bool
    ) -> None:
        generator = torch.Generator().manual_seed(int(shuffle))
        rule = torch.randn(20, CLASSES, generator=torch.Generator().manual_seed(2))
        x = torch.randn(sum(sizes), 20, generator=generator)
        y = (x @ rule).argmax(1)
        self.x, self.y = x.to(dtype), y
        self.positions = list(torch.arange(len(x)).split(list(sizes)))
        self.data = FederatedTensorDataset(
            (self.x, self.y), self.positions, batch_size=BATCH, shuffle=shuffle
        )
        self.loaders: list[DataLoader[Any]] = []
        if habit.samples is not None:
            samples = habit.samples(self.x, self.y)
            for mine in self.positions:
                part = Subset(samples, mine.tolist())
                own, collate = torch.Generator(), habit.collate
                self.loaders.append(
                    DataLoader(part, BATCH, shuffle, generator=own, collate_fn=collate)
                )

    def for_package(self) -> Any:
        """Return what a fit gets."""
        return self.loaders or self.data

    def orders(self, clients: list[int], round: int) -> CohortOrders:
        """Draw the package's orders of some clients' samples in a round."""
        return CohortOrders(self.data, clients, 0, "local", round)

    def minibatches(self, client: int, orders: CohortOrders | None) -> Iterator[Any]:
        """Iterate over a client's minibatches, in the order of a round."""
        if self.loaders:
            loader = self.loaders[client]
            if orders is not None:
                loader.generator.manual_seed(orders.key(client, 0))
            yield from loader
            return
        mine = self.positions[client]
        order = mine if orders is None else mine[orders.of(client, 0)]
        for rows in order.split(BATCH):
            yield self.x[rows], self.y[rows]


class Loop:
    """FedAvg by the user's own steps, in plain PyTorch.

    Args:
        habit: What is measured.
        module: The module, with its initial weights.
        train: Training samples.
        test: Test samples.

    Attributes:
        server: The server's parameters and buffers.
    """

    def __init__(self, habit: Habit, module: Plain, train: Source, test: Source) -> None:
        self.module, self.train, self.test = module, train, test
        self.number, self.logged = 0, list[Any]()
        self.accumulate = int(habit.flags.get("accumulate_grad_batches", 1))
        self.clip = habit.flags.get("gradient_clip_val")
        precision = habit.flags.get("precision")
        self.context: Callable[[], Any] = (
            nullcontext
            if precision is None
            else lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        )
        self.trainer: Any = SimpleNamespace(current_epoch=0)
        vars(module).update(log=self._log, _trainer=self.trainer)
        self.leaves = [leaf.detach() for leaf in module.state_dict().values()]
        self.server = [leaf.clone() for leaf in self.leaves]
        self.rates = self._optimizer()

    def _log(self, name: str, value: Any) -> None:
        self.logged.append(value)

    def _optimizer(self) -> tuple[torch.optim.Optimizer, Any, bool]:
        """Return an optimizer, its schedule, and whether that counts steps."""
        made = self.module.configure_optimizers()
        if not isinstance(made, tuple):
            return made, None, False
        (optimizer,), (schedule,) = made
        by_step = isinstance(schedule, dict)
        return optimizer, schedule["scheduler"] if by_step else schedule, by_step

    def model(self) -> dict[str, Tensor]:
        """Return the server's parameters and buffers by name."""
        return dict(zip(self.module.state_dict(), self.server, strict=True))

    def run_round(self) -> float:
        """Train the cohort, average, and evaluate every client; return the mean of its values."""
        clients = torch.arange(CLIENTS)
        cohort = sample_cohort(0, self.number, clients, COHORT).tolist()
        self.trainer.current_epoch = self.number
        self.module.train()
        orders = self.train.orders(cohort, self.number)
        uploads = [self._trained(client, orders) for client in cohort]
        weights = torch.tensor([len(self.train.positions[client]) for client in cohort]).double()
        share = (weights / weights.sum()).to(uploads[0][0].dtype)
        columns = zip(*uploads, strict=True)
        self.server = [torch.tensordot(share, torch.stack(leaves), 1) for leaves in columns]
        self.number += 1
        optimizer, schedule, by_step = self.rates
        # A schedule of steps goes on after those of the client with most of them.
        most = max(self._steps(client) for client in cohort) if by_step else 1
        optimizer.step()
        for _ in range(most if schedule is not None else 0):
            schedule.step()
        return self._evaluated()

    def _steps(self, client: int) -> int:
        minibatches = math.ceil(len(self.train.positions[client]) / BATCH)
        return -(-minibatches // self.accumulate)

    def _trained(self, client: int, orders: CohortOrders) -> list[Tensor]:
        torch._foreach_copy_(self.leaves, self.server)
        module, parameters = self.module, [*self.module.parameters()]
        optimizer, schedule, by_step = self._optimizer()
        rates = zip(optimizer.param_groups, self.rates[0].param_groups, strict=True)
        for group, now in rates:
            group["lr"] = now["lr"]
        optimizer.zero_grad()
        last = math.ceil(len(self.train.positions[client]) / BATCH) - 1
        for number, batch in enumerate(self.train.minibatches(client, orders)):
            with self.context():
                loss = module.training_step(batch, number)
            (loss / self.accumulate if self.accumulate > 1 else loss).backward()
            if (number + 1) % self.accumulate and number < last:
                continue
            if self.clip is not None:
                nn.utils.clip_grad_norm_(parameters, self.clip)
            optimizer.step()
            optimizer.zero_grad()
            if by_step:
                schedule.step()
        self.logged.clear()
        return [leaf.clone() for leaf in self.leaves]

    def _evaluated(self) -> float:
        torch._foreach_copy_(self.leaves, self.server)
        self.module.eval()
        values = list[Tensor]()
        with torch.no_grad():
            for client in range(CLIENTS):
                for number, batch in enumerate(self.test.minibatches(client, None)):
                    with self.context():
                        self.module.validation_step(batch, number)
                # Those of its minibatches, whose last one may be smaller.
                sizes = [part.numel() for part in self.test.positions[client].split(BATCH)]
                share = torch.tensor(sizes) / sum(sizes)
                values.append(torch.stack(self.logged).float() @ share)
                self.logged.clear()
        if isinstance(self.module, Listing):
            self.module.found.clear()
        return float(torch.stack(values).mean())


def sizes_of(sigma: float) -> list[int]:
    """Return the training samples of each client."""
    spread = torch.randn(CLIENTS, generator=torch.Generator().manual_seed(1)) * sigma
    return [max(8, round(SIZES[sigma] * math.exp(float(one)))) for one in spread]


def run(
    habit: Habit,
    sigma: float,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    engine: Any = "auto",
) -> tuple[InTurns, FederatedStrategy, float]:
    """Run rounds of both sides in turns.

    Args:
        habit: What is measured.
        sigma: Of the logarithm of the clients' sizes.
        rounds: Number of rounds.
        dtype: Of samples and parameters.
        engine: The strategy's ``engine``.

    Returns:
        The clock, the strategy, and how far the sides' models are apart at the end, relative to the
        way from the initial ones.
    """
    sizes = sizes_of(sigma)
    train, test = (
        Source(habit, some, dtype, shuffle)
        for some, shuffle in ((sizes, True), ([size // 4 for size in sizes], False))
    )
    modules = []
    for _ in range(2):
        L.seed_everything(0, verbose=False)
        modules.append(habit.module().to(dtype))
    loop = Loop(habit, modules[1], train, test)
    initial = [leaf.clone() for leaf in loop.server]
    strategy = FederatedStrategy(FedAvg(), COHORT, engine=engine, seed=0)
    clock = InTurns(math.inf, ())
    clock.other = torch.enable_grad()(loop.run_round)
    trainer = quiet_trainer(
        strategy, rounds, accelerator="cpu", devices=1, callbacks=[clock], num_sanity_val_steps=0,
        **habit.flags,
    )  # fmt: skip
    trainer.fit(modules[0], datamodule=Splits(train.for_package(), test.for_package()))
    shared = strategy.federation.shared_model()
    pairs = [(shared[name], leaf) for name, leaf in loop.model().items()]
    apart, way = (
        sum(float((one - other).double().square().sum()) for one, other in some)
        for some in (pairs, zip(initial, loop.server, strict=True))
    )
    return clock, strategy, math.sqrt(apart / way)


def check(name: str, sigma: float) -> float:
    """Compare both sides' models after some rounds in double precision; see :data:`cells.SAME`."""
    apart = run(HABITS[name], sigma, CHECKED_ROUNDS, torch.float64)[2]
    assert apart < SAME, f"{name}, {sigma}: the models differ by {apart:.1e}"
    return apart


def combinations() -> list[tuple[str, float]]:
    """Return what is measured: habits and the spread of sizes."""
    return list(product(HABITS, SIGMAS))


def measure(name: str, sigma: float, checked: bool = True) -> dict[str, Any]:
    """Measure a row of :mod:`benchmarks.users`.

    Args:
        name: A key of :data:`HABITS`.
        sigma: Of the logarithm of the clients' sizes.
        checked: Whether to compare the models of both sides in double precision before.

    Raises:
        AssertionError: If they differ.
    """
    gc.collect()
    with use_threads(1):
        if checked:
            check(name, sigma)
        clock, strategy, _ = run(HABITS[name], sigma, FIRST + LATER)
    return asdict(Row.of(clock, FIRST, strategy))
