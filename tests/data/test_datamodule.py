"""The data module: splits disjoint per client, one seed for everything, no silent validation."""

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.data import (
    IID,
    ClassesPerClient,
    Digits,
    FeatureSkew,
    FederatedDataModule,
    FederatedTensorDataset,
    Partition,
    Source,
    SourceData,
)
from lightning_pfl.data.holdout import cut
from lightning_pfl.models import MLP


class Numbers(Source):
    """Sample i has feature i and class i mod 4; optionally with 80 test samples and clients."""

    def __init__(self, test: bool = False, clients: int = 0) -> None:
        self.test, self.clients, self.loaded, self.prepared = test, clients, 0, 0

    def prepare(self) -> None:
        self.prepared += 1

    def load(self) -> SourceData:
        self.loaded += 1
        x, x_test = torch.arange(400), 1000 + torch.arange(80)
        who = {"who": np.arange(400) % self.clients} if self.clients else {}
        who_test = {"who": np.arange(80) % self.clients} if self.clients else {}
        return SourceData(
            (x, x % 4),
            (x % 4).numpy(),
            (x_test, x_test % 4) if self.test else None,
            (x_test % 4).numpy() if self.test else None,
            transform=lambda batch: (batch[0].float(), batch[1]),
            augment=lambda batch: batch,
            num_classes=4,
            columns=who,
            test_columns=who_test if self.test else {},
        )


def features(data: Any) -> list[list[float]]:
    assert isinstance(data, FederatedTensorDataset)
    return [data.gather(row)[0].tolist() for row in data.indices]


@pytest.mark.parametrize("own_test", [False, True])
@pytest.mark.parametrize("partition", [IID(), ClassesPerClient(2)])
def test_splits_are_disjoint_and_complete(own_test: bool, partition: Any) -> None:
    data = FederatedDataModule(Numbers(own_test), partition, num_clients=10, val_fraction=0.25)
    data.setup()
    train, val = features(data.train_dataloader()), features(data.val_dataloader())
    test = features(data.test_dataloader())
    for k in range(10):
        together = train[k] + val[k] + test[k]
        assert len(set(together)) == len(together)
        assert min(len(train[k]), len(val[k]), len(test[k])) > 0
        assert len(val[k]) == round(0.25 * (len(train[k]) + len(val[k])))
    everything = sorted(x for part in (train, val, test) for row in part for x in row)
    assert everything == [*range(400), *(range(1000, 1080) if own_test else ())]


def test_train_and_test_have_the_same_classes() -> None:
    data = FederatedDataModule(Numbers(test=True), ClassesPerClient(2), num_clients=10)
    data.setup()
    train, test = data.train_dataloader(), data.test_dataloader()
    for a, b in zip(train.indices, test.indices, strict=True):
        assert set(train.fields[1][a].tolist()) == set(test.fields[1][b].tolist())


def test_the_seed_decides_and_other_settings_do_not_move_samples() -> None:
    def test_split(**settings: Any) -> list[list[float]]:
        data = FederatedDataModule(Numbers(), num_clients=10, **settings)
        data.setup()
        return features(data.test_dataloader())

    base = test_split()
    assert test_split() == base
    assert test_split(val_fraction=0.3, batch_size=3, drop_last=True) == base
    assert test_split(seed=1) != base


def test_roles_of_the_splits() -> None:
    data = FederatedDataModule(
        Numbers(), num_clients=4, val_fraction=0.1, batch_size=7, eval_batch_size=64, drop_last=True
    )
    data.setup()
    train, val, test = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert (train.batch_size, train.shuffle, train.drop_last) == (7, True, True)
    assert train.augment is not None
    for split in (val, test):
        assert (split.batch_size, split.shuffle, split.drop_last) == (64, False, False)
        assert split.augment is None
        assert split.transform is train.transform
    assert data.predict_dataloader() is test
    assert data.num_classes == 4


def test_no_validation_unless_asked_for() -> None:
    data = FederatedDataModule(Numbers(), num_clients=4)
    data.setup()
    assert features(data.val_dataloader()) == [[]] * 4
    on_test = FederatedDataModule(Numbers(), num_clients=4, val_split="test")
    on_test.setup()
    assert features(on_test.val_dataloader()) == features(on_test.test_dataloader())


def test_setup_loads_once_and_prepare_reaches_the_source() -> None:
    source = Numbers()
    data = FederatedDataModule(source, num_clients=4)
    data.prepare_data()
    for stage in ("fit", "validate", "test"):
        data.setup(stage)
    assert (source.prepared, source.loaded) == (1, 1)
    assert data.train_dataloader() is data.train_dataloader()


def test_new_clients_are_the_last_ones_and_take_no_part() -> None:
    whole = FederatedDataModule(Numbers(), num_clients=10, val_fraction=0.1)
    data = FederatedDataModule(Numbers(), num_clients=10, val_fraction=0.1, new_clients=3)
    assert (whole.num_clients, data.num_clients) == (10, 7)
    for split in ("train", "val", "test"):
        everyone = features(getattr(whole, f"{split}_dataloader")())
        assert features(getattr(data, f"{split}_dataloader")()) == everyone[:7]
        assert features(data.new_clients(split)) == everyone[7:]
    assert data.new_clients("test").names == ("7", "8", "9")


@pytest.mark.parametrize("val_split", ["train", "test"])
@pytest.mark.parametrize("own_test", [False, True])
def test_a_process_keeps_the_samples_of_its_own_clients(own_test: bool, val_split: Any) -> None:
    def make() -> FederatedDataModule:
        fraction = 0.25 if val_split == "train" else 0.0
        return FederatedDataModule(
            Numbers(own_test),
            IID(),
            7,
            val_fraction=fraction,
            val_split=val_split,
            new_clients=2,
            public_samples=11,
        )

    whole, part = make(), make()
    part.keep_clients(["1", "4"])
    for split in ("train", "val", "test"):
        all_of, some = (getattr(m, f"{split}_dataloader")() for m in (whole, part))
        assert some.num_samples.tolist() == all_of.num_samples.tolist()
        for client in (1, 4):
            assert torch.equal(*(data.gather(data.indices[client])[0] for data in (some, all_of)))
        with pytest.raises(RuntimeError, match="client '2', whose samples another process has"):
            some.indices[2]
        assert features(part.new_clients(split)) == features(whole.new_clients(split))
        assert some.pool_size == int(some.num_samples[[1, 4]].sum())
    assert part.val_dataloader() is part.test_dataloader() or val_split == "train"
    public = [module.public_dataloader() for module in (part, whole)]
    assert features(public[0]) == features(public[1])
    assert public[0] is not None
    assert public[0].pool_size == 11
    assert part.digest() == whole.digest()
    assert part.num_classes == 4
    # Nothing holds the whole pool any more.
    assert not any(split.fields for split in part._splits.values())
    part.keep_clients(["4", "1"])
    assert part.source.loaded == 1  # type: ignore[attr-defined]
    part.keep_clients(["2"])
    assert part.source.loaded == 2  # type: ignore[attr-defined]
    assert len(part.train_dataloader().indices[2])


def test_clients_named_by_the_source_are_natural() -> None:
    data = FederatedDataModule(Numbers(test=True, clients=5))
    data.setup()
    train, test = data.train_dataloader(), data.test_dataloader()
    assert train.names == test.names == ("0", "1", "2", "3", "4")
    for k in range(5):
        assert {int(x) % 5 for x in features(train)[k] + features(test)[k]} == {k}


class OfMyOwn(Partition):
    """Two clients that have sample 1 both, and a third without any; the test set likewise."""

    def split(self, labels: Any, num_clients: Any, rng: Any) -> Any:
        return [[0, 1], torch.tensor([1, 2]), []], None

    def apply(self, labels: Any, plan: Any, rng: Any) -> Any:
        return ([3], np.array([3, 4], dtype=np.uint8), ())


def test_parts_may_be_lists_or_tensors_and_overlap() -> None:
    data = FederatedDataModule(Numbers(test=True), OfMyOwn(), num_clients=3)
    data.setup()
    assert features(data.train_dataloader()) == [[0, 1], [1, 2], []]
    assert features(data.test_dataloader()) == [[1003], [1003, 1004], []]


@pytest.mark.parametrize("show", [repr, str])
def test_the_summary_loads_nothing_and_counts_what_is_split(show: Callable[[Any], str]) -> None:
    source = Numbers()
    data = FederatedDataModule(source, ClassesPerClient(2), num_clients=10, val_fraction=0.25)
    before = "FederatedDataModule(source=Numbers, partition=ClassesPerClient, num_clients=10"
    assert show(data) == f"{before})"
    assert source.loaded == 0
    data.setup()
    # 400 samples: a fifth is cut off for tests, and a quarter of the rest for validation.
    assert show(data) == f"{before}, train=240 samples, val=80 samples, test=80 samples)"


def test_the_summary_names_what_was_chosen() -> None:
    data = FederatedDataModule(Numbers(test=True, clients=5), new_clients=2)
    assert repr(data) == "FederatedDataModule(source=Numbers, new_clients=2)"
    data.setup()
    assert repr(data) == (
        "FederatedDataModule(source=Numbers, partition=Natural, num_clients=5, new_clients=2, "
        "train=400 samples, val=0 samples, test=80 samples)"
    )


def test_feature_skew_reaches_all_splits() -> None:
    """Four clients, turned by k quarter turns: turned back, all samples are the source's."""
    arrays = Digits().load()
    data = FederatedDataModule(Digits(), FeatureSkew("rotate90"), num_clients=4, val_fraction=0.1)
    data.setup()
    for split in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for k, row in enumerate(split.indices):
            images = split.gather(row)[0]
            assert torch.equal(images.rot90(-k, dims=(2, 3)), arrays.fields[0][row])


def test_the_module_is_built_by_jsonargparse() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(FederatedDataModule, "data")
    settings = {
        "class_path": "FederatedDataModule",
        "init_args": {
            "source": {"class_path": "Digits"},
            "partition": {
                "class_path": "lightning_pfl.data.FeatureSkew",
                "init_args": {"kind": "rotate90", "base": {"class_path": "ClassesPerClient"}},
            },
            "num_clients": 10,
            "val_fraction": 0.1,
        },
    }
    # jsonargparse 4.49 renamed the method.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    data = instantiate(parser.parse_object({"data": settings})).data
    assert isinstance(data.partition, FeatureSkew)
    assert isinstance(data.partition.base, ClassesPerClient)
    assert data.num_clients == 10


class TestCut:
    parts = [np.arange(40), np.arange(40, 41), np.arange(41, 43), np.arange(43, 43)]  # noqa: RUF012
    labels = np.concatenate([np.repeat([0, 1, 2], [20, 15, 5]), [0, 1, 0]])

    def test_sizes(self) -> None:
        """A single sample stays, two samples give one, an empty client stays empty."""
        stay, off = cut(self.parts, self.labels, 0.2, np.random.default_rng(0))
        assert [len(part) for part in off] == [8, 0, 1, 0]
        for part, a, b in zip(self.parts, stay, off, strict=True):
            assert sorted([*a, *b]) == part.tolist()

    def test_every_class_gives_its_share(self) -> None:
        for seed in range(20):
            _, off = cut(self.parts, self.labels, 0.2, np.random.default_rng(seed))
            counts = np.bincount(self.labels[off[0]], minlength=3)
            assert np.abs(counts - [4, 3, 1]).max() <= 1

    def test_every_sample_is_equally_likely(self) -> None:
        hits = np.zeros(40)
        for seed in range(500):
            _, off = cut(self.parts[:1], self.labels, 0.2, np.random.default_rng(seed))
            hits[off[0]] += 1
        # Binomial(500, 0.2): mean 100, standard deviation 8.9; 40 samples within 4.5 of it.
        assert np.abs(hits - 100).max() < 40

    @pytest.mark.parametrize("fraction", [0.0, 1e-9, 0.5, 1 - 1e-12])
    def test_extreme_fractions_leave_one_sample(self, fraction: float) -> None:
        stay, off = cut(self.parts, self.labels, fraction, np.random.default_rng(0))
        want = {0.0: 0, 1e-9: 1, 0.5: 20}.get(fraction, 39)
        assert (len(stay[0]), len(off[0])) == (40 - want, want)


def test_a_trainer_without_a_federated_strategy_is_named() -> None:
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    data = FederatedDataModule(Numbers(), IID(), num_clients=4)
    with pytest.raises(
        MisconfigurationException,
        match=r"Expected a federated run, but FederatedDataModule is used with SingleDevice.*Pass",
    ):
        trainer.fit(MLP([4, 4], num_classes=4, lr=0.1), data)
