"""What users' modules do in a step: against plain torch, one client after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pfl.core.parameters import ParameterSplit, places
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.known_code import UnknownCodeError, read_by_step
from lightning_pfl.methods import FedAvg, FedRep
from lightning_pfl.testing.fitting import fit
from lightning_pfl.testing.rounds import local_round
from tests.engine.nets import compare

SIZES = (5, 2, 7, 3)
ENGINES = ["vectorized", "sequential"]


def clients(shuffle: bool = False, batch_size: int = 2) -> FederatedTensorDataset:
    """Four numbers to predict one from; batches of two, the last ones short."""
    generator = torch.Generator().manual_seed(4)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    total = sum(SIZES)
    fields = (torch.randn(total, 4, **draw), torch.randn(total, **draw))
    positions = torch.arange(total).split(SIZES)
    return FederatedTensorDataset(fields, positions, batch_size=batch_size, shuffle=shuffle)


class Net(L.LightningModule):
    """Regression by ``head(backbone(x))``."""

    def __init__(self, backbone: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.backbone(x)).squeeze(-1)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def plain(module: Net, data: FederatedTensorDataset, client: int, epochs: int) -> dict[str, Any]:
    """The client's model after plain training with the module itself."""
    alone = copy.deepcopy(module)
    optimizer: Any = alone.configure_optimizers()
    number = 0
    for _ in range(epochs):
        for positions in data.indices[client].split(data.batch_size):
            optimizer.zero_grad()
            alone.training_step(data.gather(positions), number).backward()
            optimizer.step()
            number += 1
    return alone.state_dict()


def require_plain(make: Callable[[], Net], engine: Any, **options: Any) -> None:
    """Two epochs of an engine give what plain torch gives to every client."""
    torch.manual_seed(1)
    module, data = make(), clients()
    wanted = [plain(module, data, client, 2) for client in range(len(SIZES))]
    outcome = local_round(FedAvg(local_epochs=2), module, data, engine, **options)
    assert set(outcome.models) <= set(wanted[0])
    for client, want in enumerate(wanted):
        for name, leaf in outcome.models.items():
            torch.testing.assert_close(leaf[client], want[name], rtol=1e-12, atol=1e-12)


# --- modules and buffers ---


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).tanh())
        return result


class Tied(Twice):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight


class Average(nn.Module):
    """Takes a running mean off, which it assigns to its buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * features.detach().mean(0)
        result: Tensor = features - self.average
        return result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Twice, Tied])
def test_layers_that_share_weights(kind: type[Twice], engine: Any) -> None:
    require_plain(lambda: Net(kind(), 4), engine)


def test_a_layer_under_two_names_keeps_its_own_parameter() -> None:
    module = Net(Twice(), 4)
    before = dict(module.named_parameters(remove_duplicate=False))
    local_round(FedAvg(), module, clients(), "sequential")
    now = dict(module.named_parameters(remove_duplicate=False))
    assert all(now[name] is leaf for name, leaf in before.items())


def test_places_name_every_owner_once() -> None:
    assert places(Twice()) == {"first.weight": ("first.weight",), "first.bias": ("first.bias",)}
    assert places(Tied())["first.weight"] == ("first.weight", "second.weight")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_buffer_may_be_assigned(engine: Any) -> None:
    require_plain(lambda: Net(Average()), engine)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("transform", ["forward", "grad"])
def test_padding_of_an_embedding_has_no_gradient(transform: str, chunk_size: int | None) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 3, padding_idx=-2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.table(x.abs().long() % 3).mean(1)
            return result

    settings = EngineSettings(chunk_size=chunk_size)
    require_plain(lambda: Net(Words()), "vectorized", transform=transform, settings=settings)


# --- the loss and its gradient ---


class Again(nn.Module):
    """Two layers of which the backward pass computes the outputs a second time."""

    def __init__(self, use_reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Dropout(dropout), nn.Tanh())
        self.last, self.use_reentrant = nn.Linear(5, 3), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        hidden: Any = checkpoint(self.layers, x, use_reentrant=self.use_reentrant)
        result: Tensor = self.last(hidden)
        return result


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers(use_reentrant: bool) -> None:
    require_plain(lambda: Net(Again(use_reentrant)), "sequential")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_that_would_be_drawn_again_is_refused(use_reentrant: bool) -> None:
    with pytest.raises(RuntimeError, match="Expected no random numbers in the backward pass, but"):
        local_round(FedAvg(), Net(Again(use_reentrant, dropout=0.5)), clients(), "sequential")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_with_one_entry(engine: Any) -> None:
    class OneEntry(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx).view(1)

    data = clients()
    found = local_round(FedAvg(), OneEntry(nn.Linear(4, 3)), data, engine).result.loss
    assert found.shape == (len(SIZES),)
    assert found.isfinite().all()


class Sometimes(Net):
    """A second output that counts in every other minibatch."""

    def __init__(self, backbone: nn.Module, first: int) -> None:
        super().__init__(backbone)
        self.other, self.first = nn.Linear(3, 1).double(), first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == self.first:
            loss = loss + self.other(self.backbone(batch[0])).square().mean()
        return loss


@pytest.mark.sweep(4)
@pytest.mark.parametrize("transform", ["forward", "grad"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("first", [0, 1])
def test_parameters_reached_by_some_minibatches(
    transform: str, accumulate: int, first: int
) -> None:
    compare(
        lambda: Sometimes(nn.Linear(4, 3), first),
        clients(),
        settings={"accumulate": accumulate},
        transform=transform,
    )
    if accumulate == 1:  # weight decay and momentum move it only where there is a gradient
        make = lambda: Sometimes(nn.Linear(4, 3), first)  # noqa: E731
        require_plain(make, "vectorized", transform=transform)


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_by_norm_is_of_what_the_optimizer_has(engine: Any) -> None:
    class HeadOnly(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.head.parameters(), lr=1.0)

    torch.manual_seed(1)
    module, data = HeadOnly(nn.Linear(4, 3)), clients(batch_size=100)
    settings = EngineSettings(clip_value=0.1)
    outcome = local_round(FedAvg(), module, data, engine, settings=settings)
    for client in range(len(SIZES)):
        start = module.head.state_dict()
        moves = [outcome.models[f"head.{n}"][client] - start[n] for n in start]
        # One step at rate 1 along a gradient that is longer than 0.1.
        norm = torch.cat([move.flatten() for move in moves]).norm()
        torch.testing.assert_close(norm, norm.new_tensor(0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_where_nothing_of_the_optimizer_has_a_gradient(engine: Any) -> None:
    """The head phase of a split whose optimizer has only the body."""

    class BodyOnly(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.backbone.parameters(), lr=1.0)

    module = BodyOnly(nn.Linear(4, 3))
    method, settings = FedRep(head_epochs=1), EngineSettings(clip_value=0.1)
    outcome = local_round(method, module, clients(), engine, settings=settings, only=0)
    before = outcome.before["model"]
    assert all(torch.equal(outcome.models[name], leaf) for name, leaf in before.items())


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(hook: str) -> None:
    module = nn.Linear(2, 2)
    getattr(module.weight, hook)(lambda grad: None)
    with pytest.raises(ValueError, match=r"Expected parameters without hooks, but 'weight' has"):
        ParameterSplit(module)


# --- order and random numbers ---


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_a_client_continues_its_own_order_after_a_phase_of_steps(chunk_size: int) -> None:
    """Clients of different sizes pass their data a different number of times in three steps."""
    compare(
        lambda: Net(nn.Linear(4, 3)),
        clients(shuffle=True),
        lambda: FedRep(head_steps=3, body_steps=2),
        (chunk_size,),
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chunk_size", [1, 2, 4])
@pytest.mark.parametrize("steps", [None, 5])
def test_dropout_under_accumulation(chunk_size: int, steps: int | None) -> None:
    """Incomplete steps at the ends of epochs, at other places in other clients."""

    def dropping() -> Net:
        return Net(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))

    epochs = None if steps else 3
    method: Callable[[], Any] = lambda: FedAvg(local_epochs=epochs, local_steps=steps)  # noqa: E731
    compare(dropping, clients(), method, (chunk_size,), settings={"accumulate": 2})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("engine", [*ENGINES, "reference"])
def test_layers_of_torchscript(engine: Any) -> None:
    """Their class has no `forward`, and what they compute isn't known to Python."""

    def models(change: Callable[[nn.Module], nn.Module]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = Net(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
        net.backbone[0] = change(net.backbone[0])  # type: ignore[index, operator]
        if change is torch.jit.script:
            with pytest.raises(UnknownCodeError, match="ScriptModule"):
                read_by_step(net, "training_step")
        return fit(FedAvg(), clients(), net, 2, engine).models

    scripted, plain = models(torch.jit.script), models(lambda layer: layer)
    for name, leaf in plain.items():
        assert torch.allclose(scripted[name], leaf, rtol=1e-12), name
