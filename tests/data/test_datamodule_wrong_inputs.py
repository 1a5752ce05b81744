"""Wrong settings of the data package: what was given, what was expected, what to do.

Wrong loaders are in test_loaders.py, broken files in test_sources.py, wrong tables in
test_table.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data import (
    IID,
    ClassesPerClient,
    Digits,
    Dirichlet,
    FeatureSkew,
    FederatedDataModule,
    FederatedTensorDataset,
    FlowerPartitioner,
    LabelSkew,
    LastSamples,
    LinearRepresentation,
    LogNormalSizes,
    Natural,
    Partition,
    QuadraticClients,
    QuantitySkew,
    Source,
    SourceData,
)

X, Y = torch.zeros(10, 3), torch.arange(10)
LABELS = np.arange(100) % 10


def labelled(labels: Any) -> None:
    class Labelled(Source):
        def load(self) -> SourceData:
            return SourceData((torch.zeros(3, 1), torch.zeros(3)), labels)

    FederatedDataModule(Labelled(), num_clients=1).setup()


def split(partition: Partition, clients: Any = 5, labels: Any = LABELS) -> Any:
    return partition.split(np.asarray(labels), clients, np.random.default_rng(0))


def module(**settings: Any) -> FederatedDataModule:
    return FederatedDataModule(**{"source": Digits(), "num_clients": 10, **settings})


def skew(features: torch.Tensor, kind: Any, parts: Any = None) -> Any:
    partition = FeatureSkew(kind)
    drawn, plan = split(partition, 2, np.zeros(len(features)))
    return partition.change_features(features, drawn if parts is None else parts, plan)


class TwoPartitions:
    num_partitions = 2
    dataset = None

    def load_partition(self, partition_id: int) -> Any:
        raise AssertionError("must not be reached")


class ByHospital:
    num_partitions = 2
    dataset: Any = None

    def load_partition(self, partition_id: int) -> Any:
        raise ValueError(f"Column (hospital) not in {self.dataset.column_names}.")


class Twice(IID):
    """Gives client 1 its first sample a second time."""

    def apply(self, labels: Any, plan: Any, rng: np.random.Generator) -> Any:
        first, second, *others = super().apply(labels, plan, rng)
        return [first, np.append(second, second[0]), *others]


Case = tuple[Callable[[], Any], type[Exception], str]
CASES: dict[str, Case] = {
    # Partitions
    "no clients": (
        lambda: split(IID(), 0),
        ValueError,
        "`num_clients` .* num_clients=0.* at least one",
    ),
    "negative clients": (lambda: split(IID(), -3), ValueError, "num_clients=-3"),
    "clients not given": (
        lambda: split(IID(), None),
        ValueError,
        "num_clients=None.* Give the number",
    ),
    "fractional clients": (lambda: split(IID(), 2.5), ValueError, "positive int.*num_clients=2.5"),
    "more clients than samples": (
        lambda: split(IID(), 101),
        ValueError,
        r"at least 1 samples for each of 101 clients \(101 in all\), but got 100 samples",
    ),
    "minimum too large": (
        lambda: split(Dirichlet(1.0, min_size=21)),
        ValueError,
        r"at least 21 samples for each of 5 clients \(105 in all\), but got 100",
    ),
    "minimum too large for sizes": (
        lambda: split(LogNormalSizes(1.0, min_size=50)),
        ValueError,
        r"\(250 in all\), but got 100",
    ),
    "more classes than there are": (
        lambda: split(ClassesPerClient(11)),
        ValueError,
        r"at most the number of classes \(10\), but got classes_per_client=11. Use a smaller",
    ),
    "too few places for the classes": (
        lambda: split(ClassesPerClient(1), 5),
        ValueError,
        r"Expected 10 classes to fit .* but got 5 \* 1. Use more clients",
    ),
    "more shards than samples of a class": (
        lambda: split(ClassesPerClient(2), 60),
        ValueError,
        "got 10 samples for 12 shards of class 0. Use fewer clients",
    ),
    "no classes per client": (
        lambda: ClassesPerClient(0),
        ValueError,
        "classes_per_client=0. Use 2",
    ),
    "fractional classes": (lambda: ClassesPerClient(1.5), ValueError, "classes_per_client=1.5"),  # type: ignore[arg-type]
    "classes of a regression": (
        lambda: split(ClassesPerClient(2), 5, np.linspace(0, 1, 100)),
        ValueError,
        "one class label per sample for ClassesPerClient.* dtype float64.* such as IID",
    ),
    "Dirichlet of a regression": (
        lambda: split(Dirichlet(1.0), 5, np.linspace(0, 1, 100)),
        ValueError,
        "for Dirichlet",
    ),
    "alpha zero": (lambda: Dirichlet(0.0), ValueError, "`alpha` .* positive .* alpha=0.0"),
    "alpha negative": (lambda: Dirichlet(-1), ValueError, "alpha=-1"),
    "alpha nan": (lambda: Dirichlet(float("nan")), ValueError, "alpha=nan"),
    "alpha infinite": (lambda: Dirichlet(float("inf")), ValueError, "alpha=inf"),
    "negative minimum": (
        lambda: Dirichlet(1.0, min_size=-1),
        ValueError,
        "`min_size` .* min_size=-1",
    ),
    "sigma negative": (lambda: LogNormalSizes(-0.5), ValueError, "`sigma` .* sigma=-0.5"),
    "ratio zero": (lambda: QuantitySkew(ratio=0), ValueError, "`ratio` .* ratio=0"),
    "share of small clients": (
        lambda: QuantitySkew(small_fraction=1.2),
        ValueError,
        r"`small_fraction` .* in \[0, 1\].*1.2",
    ),
    "share above one": (lambda: LabelSkew(share=85), ValueError, r"share in \[0, 1\].* share=85"),
    "unknown label": (lambda: split(LabelSkew(label=12)), ValueError, "`label` .* label=12"),
    "label skew of too few samples": (
        lambda: split(LabelSkew(0, 1.0, 1.0), 11),
        ValueError,
        "11 clients with share=1.0 of label 0, but got 10 samples with it and 90 without",
    ),
    "unknown feature map": (lambda: FeatureSkew("shear"), ValueError, "`kind` .* kind='shear'"),  # type: ignore[arg-type]
    "angle too large": (lambda: FeatureSkew("rotate", max_angle=270), ValueError, "max_angle=270"),
    "rotated vectors": (
        lambda: skew(torch.zeros(10, 4), "rotate"),
        ValueError,
        r"square images.*\(10, 4\).*affine",
    ),
    "rotated oblong images": (
        lambda: skew(torch.zeros(10, 1, 4, 6), "rotate90"),
        ValueError,
        r"square.*\(10, 1, 4, 6\)",
    ),
    "affine map of images": (
        lambda: skew(torch.zeros(10, 1, 4, 4), "affine"),
        ValueError,
        "floating-point vectors.*rotation",
    ),
    "affine map of integers": (
        lambda: skew(torch.zeros(10, 4, dtype=torch.long), "affine"),
        ValueError,
        "torch.int64",
    ),
    "feature skew of shared samples": (
        lambda: skew(torch.zeros(10, 4), "affine", [np.array([1, 2]), np.array([2, 3])]),
        ValueError,
        "disjoint samples .* got 1 samples held twice",
    ),
    "natural without column": (
        lambda: Natural().keys(LABELS, {}),
        ValueError,
        r"columns \[\], but got column=None",
    ),
    "natural with another column": (
        lambda: Natural("site").keys(LABELS, {"ward": LABELS}),
        ValueError,
        r"columns \['ward'\], but got column='site'. Name the client column",
    ),
    "more natural clients than there are": (
        lambda: split(Natural(), 11),
        ValueError,
        "between 1 and 10, .* num_clients=11",
    ),
    "no natural client is large enough": (
        lambda: split(Natural(min_size=11), None),
        ValueError,
        r"min_size=11 samples \(of 10; the largest has 10\)",
    ),
    "not a Flower partitioner": (
        lambda: FlowerPartitioner(IID()),
        TypeError,
        "with `load_partition`, but got IID. Pass",
    ),
    "Flower partitioner for other numbers": (
        lambda: split(FlowerPartitioner(TwoPartitions()), 5),
        ValueError,
        "num_partitions=2, but got num_clients=5. Leave num_clients out",
    ),
    "Flower partitioner by another column": (
        lambda: split(FlowerPartitioner(ByHospital()), 2),
        ValueError,
        r"columns 'label' and 'position', but ByHospital raised: Column \(hospital\) not in "
        r"\['label', 'position'\]\. Set label_column to its partition_by",
    ),
    "sample held twice": (
        lambda: module(partition=Twice()).setup(),
        ValueError,
        r"each sample once, but Twice gave sample \d+ to client 1 several times. Remove",
    ),
    # Data module
    "validation of everything": (
        lambda: module(val_fraction=1.0),
        ValueError,
        r"\[0, 1\).*val_fraction=1.0",
    ),
    "negative validation": (lambda: module(val_fraction=-0.1), ValueError, "val_fraction=-0.1"),
    "validation nan": (lambda: module(val_fraction=float("nan")), ValueError, "val_fraction=nan"),
    "validation text": (
        lambda: module(val_fraction="0.2"),
        ValueError,
        r"`val_fraction` to be in \[0, 1\), but got val_fraction='0.2'. Use 0.1",
    ),
    "test text": (lambda: module(test_fraction="0.2"), ValueError, "got test_fraction='0.2'. Use"),
    "negative seed": (lambda: module(seed=-1), ValueError, "`seed` .* >= 0, but got seed=-1. Use"),
    "seed text": (lambda: module(seed="a"), ValueError, "whole number >= 0, but got seed='a'"),
    "seed fraction": (lambda: module(seed=0.5), ValueError, "whole number >= 0, but got seed=0.5"),
    "no test": (lambda: module(test_fraction=0.0), ValueError, r"in \(0, 1\).* test_fraction=0.0"),
    "test of everything": (lambda: module(test_fraction=1), ValueError, "test_fraction=1"),
    "test cut of a source with test set": (
        lambda: FederatedDataModule(QuadraticClients(), test_fraction=0.5).setup(),
        ValueError,
        "no `test_fraction` for QuadraticClients, which has its own test set.*0.5. Leave it out",
    ),
    "unknown validation split": (lambda: module(val_split="dev"), ValueError, "val_split='dev'"),
    "two ways to validate": (
        lambda: module(val_split="test", val_fraction=0.1),
        ValueError,
        "val_fraction=0.1. Choose one",
    ),
    "batch size": (lambda: module(batch_size=0), ValueError, "`batch_size` .* batch_size=0"),
    "evaluation batch size": (
        lambda: module(eval_batch_size=2.5),
        ValueError,
        "`eval_batch_size` .* eval_batch_size=2.5",
    ),
    "negative new clients": (lambda: module(new_clients=-1), ValueError, "new_clients=-1"),
    "only new clients": (
        lambda: module(new_clients=10).setup(),
        ValueError,
        r"below the number of clients \(10\), but got new_clients=10. Leave at least one",
    ),
    "no new clients": (lambda: module().new_clients(), ValueError, "got new_clients=0. Set Fed"),
    "unknown split": (
        lambda: module(new_clients=1).new_clients("dev"),  # type: ignore[arg-type]
        ValueError,
        "`split` .* split='dev'",
    ),
    "new clients without validation": (
        lambda: module(new_clients=1).new_clients("val"),
        ValueError,
        "got val_fraction=0. Set",
    ),
    "a cut that cuts nothing": (
        lambda: FederatedDataModule(LinearRepresentation(2), cut=LastSamples()).setup(),
        ValueError,
        "`cut` with val_fraction above 0, or a source without a test set only",
    ),
    "number of clients not given": (
        lambda: FederatedDataModule(Digits()).setup(),
        ValueError,
        "num_clients=None",
    ),
    # Resident datasets
    "position outside the pool": (
        lambda: FederatedTensorDataset((X, Y), [[0], [], [3, 10]], names=["a", "b", "c"]),
        ValueError,
        r"positions in 0..9, but got 10 for client 'c'",
    ),
    "negative position": (
        lambda: FederatedTensorDataset((X, Y), [[-1], [0]]),
        ValueError,
        "got -1 for client '0'",
    ),
    "mask as positions": (
        lambda: FederatedTensorDataset((X, Y), [Y > 3]),
        TypeError,
        r"torch.bool.*mask.nonzero",
    ),
    "float positions": (
        lambda: FederatedTensorDataset((X, Y), [[0], [0.5]]),
        TypeError,
        "client 1 has dtype torch.float",
    ),
    "fields of different length": (
        lambda: FederatedTensorDataset((X, Y[:9]), [[0]]),
        ValueError,
        r"\[\(10, 3\), \(9,\)\]",
    ),
    "field without samples": (
        lambda: FederatedTensorDataset(torch.tensor(1.0), [[0]]),
        ValueError,
        "leading dimension",
    ),
    "field that is no tensor": (
        lambda: FederatedTensorDataset((X, np.zeros(10)), [[0]]),
        TypeError,
        "got a ndarray inside",
    ),
    "names for other clients": (
        lambda: FederatedTensorDataset((X, Y), [[0]], names=["a", "b"]),
        ValueError,
        r"one name per client \(1\), but got 2",
    ),
    "equal names": (
        lambda: FederatedTensorDataset((X, Y), [[0], [1]], names=["a", "a"]),
        ValueError,
        r"unique, but got \['a'\]",
    ),
    "batch of nothing": (
        lambda: FederatedTensorDataset((X, Y), [[0]], batch_size=0),
        ValueError,
        "batch_size=0",
    ),
    "client that does not exist": (
        lambda: FederatedTensorDataset((X, Y), [[0]]).subset([1]),
        IndexError,
        "in 0..0, but got 1",
    ),
    "take a negative number": (
        lambda: FederatedTensorDataset((X, Y), [[0]]).take(-1, seed=0),
        ValueError,
        "samples_per_client=-1",
    ),
    # Sources of one's own
    "no labels": (lambda: labelled(None), ValueError, "3 samples.*labels=None.*targets"),
    "a label too few": (lambda: labelled(np.zeros(2)), ValueError, "Labelled .* 3 samples"),
    # Synthetic sources
    "clients of different number": (
        lambda: QuadraticClients((1.0, 2.0), (0.0,)),
        ValueError,
        "but got 2, 1 and 2",
    ),
    "no curvature": (lambda: QuadraticClients((1.0, 0.0)), ValueError, r"positive.*\[1.0, 0.0\]"),
    "client without samples": (lambda: QuadraticClients(samples=0), ValueError, "samples=0"),
    "negative spread": (lambda: QuadraticClients(spread=-1.0), ValueError, "spread=-1.0"),
    "rank above dimension": (
        lambda: LinearRepresentation(dim=2, rank=3),
        ValueError,
        "at most dim=2, but got rank=3",
    ),
    "no dimension": (lambda: LinearRepresentation(dim=0), ValueError, "`dim` .* dim=0"),
    "negative noise": (
        lambda: LinearRepresentation(noise_variance=-1.0),
        ValueError,
        "noise_variance=-1.0",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_refused(case: str) -> None:
    call, error, match = CASES[case]
    with pytest.raises(error, match=match) as caught:
        call()
    assert str(caught.value).startswith("Expected ")
