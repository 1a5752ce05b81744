"""Users' DataLoaders: the same numbers as resident tensors, and randomness that belongs to the
client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.methods import FedAvg, FedRep
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_trees_close,
    assert_trees_equal,
    local_round,
)
from tests.engine.nets import SIZES, cnn, compare, image_clients

RESIDENT = image_clients(shuffle=False)


def samples(client: int) -> tuple[Tensor, Tensor]:
    batch: tuple[Tensor, Tensor] = RESIDENT.gather(RESIDENT.indices[client])
    return batch


def loaders(shuffle: bool = False, **settings: Any) -> FederatedLoaders:
    """One loader per client over the data of ``image_clients``; an empty client can't shuffle."""
    found = []
    for client, size in enumerate(SIZES):
        data = TensorDataset(*samples(client))
        found.append(DataLoader(data, batch_size=4, shuffle=shuffle and size > 0, **settings))
    return FederatedLoaders(found)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_plain_loaders_equal_resident_tensors(engine: Any, norm: bool) -> None:
    a = local_round(FedAvg(local_epochs=2), cnn(norm), loaders(), engine)
    b = local_round(FedAvg(local_epochs=2), cnn(norm), RESIDENT, engine)
    assert_trees_close(a.models, b.models)
    assert_trees_close(a.result.logs, b.result.logs)
    assert torch.equal(a.info.steps, b.info.steps)


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "limited": {"limit_train_batches": 2},
    "clipped": {"clip_value": 0.1},
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_engines_agree(shuffle: bool, flags: dict[str, Any]) -> None:
    compare(cnn, loaders(shuffle), chunk_sizes=(1, 3), settings=flags)


def test_steps_cycle_through_a_loader() -> None:
    compare(cnn, loaders(True), lambda: FedAvg(local_epochs=None, local_steps=7))


def test_phases_draw_new_batches() -> None:
    """Those that one phase of two epochs draws, in which every sample comes once an epoch."""
    seen: dict[str, list[float]] = {}

    class Looking(PersonalizedModule):
        name = ""

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            seen.setdefault(self.name, []).extend(batch[0][:, 0, 0, 0].tolist())
            return super().training_step(batch, batch_idx)

    for name, method in (("one", FedAvg(local_epochs=2)), ("two", FedRep(head_epochs=1))):
        plain = cnn()
        module = Looking(plain.backbone, plain.head).double()
        module.name = name
        local_round(method, module, loaders(True), "sequential", clients=[3])
    assert seen["one"] == seen["two"]
    first, second = seen["two"][: SIZES[3]], seen["two"][SIZES[3] :]
    assert sorted(first) == sorted(second) == sorted(samples(3)[0][:, 0, 0, 0].tolist())
    assert first != second
    compare(cnn, loaders(True), lambda: FedRep(head_epochs=2))


class Jittered(Dataset[Any]):
    """A random transform that draws from torch's global generator, as torchvision's do."""

    def __init__(self, client: int) -> None:
        self.x, self.y = samples(client)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {
            "image": self.x[position] + torch.randn(1, 5, 5).double(),
            "label": self.y[position],
        }


class FromDict(PersonalizedModule):
    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        return super().per_sample((batch["image"], batch["label"]))


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sorts a batch by label: any code of the user's runs here."""
    ordered = sorted(items, key=lambda item: int(item["label"]))
    return {name: torch.stack([item[name] for item in ordered]) for name in items[0]}


def jittered_loaders(own_generator: bool = False) -> FederatedLoaders:
    found = []
    for client, size in enumerate(SIZES):
        data = Jittered(client)
        generator = torch.Generator().manual_seed(client) if own_generator else None
        shuffle = size > 0
        found.append(DataLoader(data, 4, shuffle, collate_fn=collate, generator=generator))
    return FederatedLoaders(found)


def from_dict() -> FromDict:
    plain = cnn()
    return FromDict(plain.backbone, plain.head, lr=0.1, momentum=0.9).double()


@pytest.mark.parametrize("own_generator", [True, False])
def test_random_transforms_and_collate(own_generator: bool) -> None:
    data = jittered_loaders(own_generator)
    compare(from_dict, data, chunk_sizes=(1, 3))


def run(round: int = 0, seed: int = 0, own_generator: bool = False) -> LocalRound:
    settings = EngineSettings(seed=seed)
    data = jittered_loaders(own_generator)
    return local_round(FedAvg(), from_dict(), data, "vectorized", round=round, settings=settings)


@pytest.mark.parametrize("own_generator", [True, False])
def test_batches_depend_on_seed_and_round_alone(own_generator: bool) -> None:
    first = run(own_generator=own_generator)
    torch.rand(5)
    assert_trees_equal(run(own_generator=own_generator).models, first.models)
    for other in (run(round=1), run(seed=1)):
        assert not torch.equal(other.models["head.weight"][3], first.models["head.weight"][3])


def test_the_global_generator_is_left_alone() -> None:
    module, data = from_dict(), jittered_loaders()
    before = torch.get_rng_state()
    for engine in ("vectorized", "sequential"):
        local_round(FedAvg(), module, data, engine)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["replacement", "weighted"])
def test_samplers_run_as_they_are(kind: str) -> None:
    found = []
    for client in (2, 3):
        data = TensorDataset(*samples(client))
        sampler: Any = RandomSampler(data, replacement=True, num_samples=7)
        if kind == "weighted":
            sampler = WeightedRandomSampler([1.0] + [0.1] * (len(data) - 1), 7)
        found.append(DataLoader(data, 4, sampler=sampler))
    outcome = compare(cnn, FederatedLoaders(found), chunk_sizes=(None, 1))
    assert outcome.info.num_samples.tolist() == [7, 7]
    assert outcome.info.steps.tolist() == [4, 4]


def test_batches_without_an_axis_for_samples() -> None:
    """``batch_size=None``: every item is a batch."""
    items = [
        [(torch.randn(3, 1, 5, 5).double(), torch.tensor([0, 1, 2]))] * 2,
        [(torch.randn(2, 1, 5, 5).double(), torch.tensor([1, 0]))],
    ]
    data = FederatedLoaders([DataLoader(some, batch_size=None) for some in items])  # type: ignore[arg-type]
    compare(cnn, data, chunk_sizes=(None, 1))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("form", [list, tuple, Pair._make])
def test_batches_of_a_users_collate_keep_their_form(form: Callable[[list[Tensor]], Any]) -> None:
    def collate(items: list[tuple[Tensor, Tensor]]) -> Any:
        return form([torch.stack(leaves) for leaves in zip(*items, strict=True)])

    class Typed(PersonalizedModule):
        def per_sample(self, batch: Any) -> dict[str, Tensor]:
            assert type(batch) is type(form([torch.zeros(1), torch.zeros(1)]))
            return super().per_sample(batch)

    def make() -> Typed:
        plain = cnn()
        return Typed(plain.backbone, plain.head, lr=0.1, momentum=0.9, weight_decay=1e-2).double()

    outcome = compare(make, loaders(collate_fn=collate), FedAvg)
    expected = local_round(FedAvg(), cnn(), RESIDENT, "reference")
    assert_trees_close(outcome.models, expected.models)


def test_a_loader_of_lists_keeps_its_structure() -> None:
    class OfList(PersonalizedModule):
        def per_sample(self, batch: Any) -> dict[str, Tensor]:
            assert isinstance(batch, list)
            (x, note), y = batch
            assert note == "note" or list(note) == ["note"] * len(y)
            return super().per_sample((x, y))

    def make() -> OfList:
        plain = cnn()
        return OfList(plain.backbone, plain.head, lr=0.1).double()

    x, y = samples(3)
    items = [((x[k], "note"), y[k]) for k in range(len(x))]
    outcome = local_round(FedAvg(), make(), FederatedLoaders([DataLoader(items, 4)]), "sequential")  # type: ignore[arg-type]
    expected = local_round(
        FedAvg(), cnn(lr=0.1, momentum=0.5, weight_decay=1e-4), RESIDENT, "sequential", clients=[3]
    )
    assert_trees_close(outcome.models, expected.models)
