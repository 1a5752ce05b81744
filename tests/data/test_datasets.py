"""The resident federated dataset: a batch is plain indexing, whatever the shape asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.data import FederatedLoaders, FederatedTensorDataset, label_counts
from lightning_pfl.data.batch import batch_leaves, map_batch
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import fit, quadratic_clients

X, Y = torch.arange(24.0).reshape(8, 3), torch.arange(8)
ROWS: tuple[list[int], ...] = ([1, 4, 6], [], [0], [7, 2])


def make(**settings: Any) -> FederatedTensorDataset:
    return FederatedTensorDataset((X, Y), ROWS, **settings)


def test_counts_and_names() -> None:
    data = make()
    assert (data.num_clients, len(data)) == (4, 4)
    assert data.names == ("0", "1", "2", "3")
    assert data.num_samples.tolist() == [len(row) for row in ROWS]
    assert [row.tolist() for row in data.indices] == [list(row) for row in ROWS]


@pytest.mark.parametrize("shape", [(5,), (0,), (2, 3), (2, 0), (2, 1, 2), ()])
def test_gather_equals_plain_indexing(shape: tuple[int, ...]) -> None:
    positions = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(0))
    x, y = make().gather(positions)
    assert torch.equal(x, X[positions])
    assert torch.equal(y, Y[positions])


def test_transform_sees_flat_batches_and_augment_is_left_to_the_engine() -> None:
    seen = []

    def transform(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        seen.append(batch[0].shape)
        return batch[0] * 2 + 1, batch[1]

    def augment(batch: Any) -> Any:
        raise AssertionError("gather must not augment")

    positions = torch.tensor([[0, 1, 7], [3, 3, 2]])
    x, y = make(transform=transform, augment=augment).gather(positions)
    assert seen == [(6, 3)]
    assert torch.equal(x, X[positions] * 2 + 1)
    assert torch.equal(y, Y[positions])


def test_fields_may_be_any_tree() -> None:
    data = FederatedTensorDataset({"a": X, "b": [Y, (X,)]}, [[0, 1], [2]])
    batch = data.gather(torch.tensor([2, 0]))
    assert torch.equal(batch["a"], X[[2, 0]])
    assert torch.equal(batch["b"][0], Y[[2, 0]])
    assert torch.equal(batch["b"][1][0], X[[2, 0]])


def test_fields_that_require_gradients_are_detached() -> None:
    """Also those that a network has made, whose graph all minibatches would share."""
    leaf, made = torch.rand(4, 2, requires_grad=True), torch.rand(4, requires_grad=True) * 2
    with pytest.warns(UserWarning, match=r"field of samples has requires_grad=True.*detach\(\)"):
        data = FederatedTensorDataset({"x": leaf, "y": [made, torch.arange(4)]}, [[0, 2], [3]])
    assert not any(field.requires_grad for field in batch_leaves(data.fields))
    assert data.fields["x"].data_ptr() == leaf.data_ptr()
    assert torch.equal(data.fields["y"][0], made.detach())
    assert leaf.requires_grad
    assert data.fields["y"][1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized"])
@pytest.mark.filterwarnings("ignore:A field of samples has requires_grad")
def test_training_with_fields_that_require_gradients(engine: str) -> None:
    data = quadratic_clients([1.0, 2.0], [1.0, 4.0])
    again = FederatedTensorDataset(
        map_batch(data.fields, lambda leaf: leaf.clone().requires_grad_() * 1.0),
        list(data.indices),
        batch_size=data.batch_size,
    )
    found, expected = (fit(FedAvg(), each, engine=engine, rounds=3) for each in (again, data))
    assert torch.equal(found.server["model"]["w"], expected.server["model"]["w"])


def test_subset_keeps_pool_names_and_order() -> None:
    part = make(names=["a", "b", "c", "d"], batch_size=3, shuffle=True).subset([3, 1])
    assert part.names == ("d", "b")
    assert [row.tolist() for row in part.indices] == [[7, 2], []]
    assert (part.batch_size, part.shuffle) == (3, True)
    assert part.fields[0] is X
    assert part.num_samples.tolist() == [2, 0]


def test_take_is_nested_seeded_and_bounded() -> None:
    data = FederatedTensorDataset((X, Y), [[0, 1, 2, 3, 4], [5, 6, 7]])
    two, four = data.take(2, seed=1), data.take(4, seed=1)
    assert two.num_samples.tolist() == [2, 2]
    assert four.num_samples.tolist() == [4, 3]
    for small, large, whole in zip(two.indices, four.indices, data.indices, strict=True):
        assert small.tolist() == large[:2].tolist()
        assert set(large.tolist()) <= set(whole.tolist())
        assert len(set(large.tolist())) == len(large)
    again = [row.tolist() for row in data.take(4, seed=1).indices]
    assert again == [row.tolist() for row in four.indices]
    draws = {tuple(data.take(2, seed=s).indices[0].tolist()) for s in range(20)}
    assert len(draws) > 5  # 20 ordered pairs are possible
    assert data.take(0, seed=0).num_samples.tolist() == [0, 0]


def test_clients_get_other_numbers_of_their_own_samples() -> None:
    data = FederatedTensorDataset((X, Y), [[4, 0, 1], [5, 6, 7], [2]]).keep(torch.tensor([0, 1]))
    rows = [data.fields[0][data.indices[client]] for client in (0, 1)]
    new = data.resized(torch.tensor([2, 7, 0]))
    assert new.num_samples.tolist() == [2, 7, 0]
    assert torch.equal(new.fields[0][new.indices[0]], rows[0][:2])
    assert torch.equal(new.fields[0][new.indices[1]], torch.cat([rows[1]] * 3)[:7])
    assert len(new.indices[2]) == 0
    assert data.num_samples.tolist() == [3, 3, 1]


def test_to_moves_everything_and_leaves_the_original() -> None:
    data = make()
    moved = data.to("meta")
    assert {leaf.device.type for leaf in (*moved.fields, *moved.indices)} == {"meta"}
    assert moved.num_samples.device.type == "cpu"
    assert data.device.type == "cpu"


def test_a_process_keeps_the_samples_of_its_own_clients() -> None:
    shared = FederatedTensorDataset((X, Y), [[6, 1], [], [6, 0], [7, 2]], names=list("abcd"))
    data = shared.keep(torch.tensor([2, 0]))
    assert data.pool_size == 3  # samples 6, 1 and 0
    assert data.num_samples.tolist() == [2, 0, 2, 2]
    for client in (0, 1, 2):
        assert torch.equal(data.gather(data.indices[client])[0], X[shared.indices[client]])
    both = data.gather(data.positions_of(torch.tensor([2, 0])))[1]
    assert both.tolist() == [[6, 0], [6, 1]]
    with pytest.raises(RuntimeError, match="'d', whose samples another process has"):
        data.indices[3]
    with pytest.raises(RuntimeError, match="'d', whose samples another process has"):
        data.positions_of(torch.tensor([3]))
    with pytest.raises(RuntimeError, match="'d'"):
        data.keep(torch.tensor([3]))
    assert data.keep(torch.tensor([0, 2])) is data
    assert data.keep(torch.tensor([0])).pool_size == 2


def test_kept_samples_can_be_arranged_anew() -> None:
    data = make(names=list("abcd")).keep(torch.tensor([0]))
    other = data.arranged([3, None, 0], ["d", "new", "a"])
    assert other.num_samples.tolist() == [2, 0, 3]
    assert other.gather(other.indices[2])[1].tolist() == ROWS[0]
    assert not len(other.indices[1])
    with pytest.raises(RuntimeError, match="'d'"):
        other.indices[0]
    expected = label_counts(make())
    assert expected is not None
    counts = label_counts(other)
    assert counts is not None
    assert torch.equal(counts, torch.stack([expected[3], expected[0] * 0, expected[0]]))


def test_no_clients_at_all() -> None:
    data = FederatedTensorDataset((X, Y), [])
    assert (data.num_clients, [*data.indices], data.num_samples.tolist()) == (0, [], [])


LABELS = torch.tensor([2, 0, 0, 3, 0, 1, 2, 0])


def test_labels_are_counted_by_client() -> None:
    """ROWS has [1, 4, 6], [], [0], [7, 2]; class 3 is in the pool alone."""
    data = FederatedTensorDataset((X, LABELS), ROWS)
    counts = label_counts(data)
    assert counts is not None
    assert counts.tolist() == [[2, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0], [2, 0, 0, 0]]
    assert torch.equal(counts.sum(1), data.num_samples)
    nobody = label_counts(FederatedTensorDataset((X, LABELS), []))
    assert nobody is not None
    assert nobody.shape == (0, 4)


@pytest.mark.parametrize(
    "fields", [X, (X,), (X, X), (X, X[:, 0]), (X, LABELS - 1), (X, LABELS > 0), {"x": X}]
)
def test_data_without_classes_have_no_counts(fields: Any) -> None:
    assert label_counts(FederatedTensorDataset(fields, ROWS)) is None


def test_loaders_have_no_counts() -> None:
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=2)
    assert label_counts(FederatedLoaders([loader])) is None
