"""Minibatches that are gathered from a data set's tensors: those that its DataLoader makes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lightning_pfl.core.randomness import seeded as seeded_by
from lightning_pfl.engine import minibatches, rows
from lightning_pfl.engine.minibatches import fetch

SAMPLES, EPOCHS = 10, 4
HERE: Any = sys.modules[__name__]
SHIFT = 0


class Pairs(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = torch.randn(SAMPLES, 2, 3, generator=generator).numpy()
        self.x, self.y = torch.from_numpy(self.numbers), torch.arange(SAMPLES)
        self.z, self.last, self.transform = self.x + 1, False, None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> Any:
        return self.x[position], self.y[position]


# --- samples that are rows ------------------------------------------------------------------------


class Dicts(Pairs):
    def __getitem__(self, position: int) -> Any:
        return {"image": self.x[position], "label": self.y[position]}


class Nested(Pairs):
    def __getitem__(self, position: int) -> Any:
        return [{"a": (self.x[position], [self.y[position]])}, self.x[position]]


class EverySecond(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.randn(2 * SAMPLES, 3, generator=torch.Generator().manual_seed(1))[::2]


class Alone(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.y[position]


class Chosen(Pairs):
    """Read what callbacks set."""

    @property
    def images(self) -> Tensor:
        return self.z if self.last else self.x

    def __getitem__(self, position: int) -> Any:
        image = self.images[position]
        if self.transform is not None:
            image = self.transform(image)
        return image, label(self.y, position)


def label(labels: Tensor, position: int) -> Tensor:
    return labels[position + SHIFT]


def own(kind: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(kind(), batch_size=3, shuffle=True)


def weighted() -> DataLoader[Any]:
    data = Pairs()
    sampler = WeightedRandomSampler([1.0] * 5 + [2.0] * 5, SAMPLES)
    return DataLoader(TensorDataset(data.x, data.y), batch_size=3, sampler=sampler)


def subset() -> DataLoader[Any]:
    return DataLoader(Subset(Subset(Dicts(), [*range(1, 9)]), [7, 0, 2, 4]), 3, shuffle=True)


def generated() -> DataLoader[Any]:
    return DataLoader(Pairs(), 4, shuffle=True, drop_last=True, generator=torch.Generator())


def chosen() -> DataLoader[Any]:
    return DataLoader(Pairs(), batch_size=3, sampler=SubsetRandomSampler([*range(SAMPLES)]))


class LongerThanItSays(Pairs):
    def __len__(self) -> int:
        return SAMPLES // 2


def longer_than_it_says() -> DataLoader[Any]:
    return DataLoader(Subset(LongerThanItSays(), range(SAMPLES)), batch_size=3, shuffle=True)


class Unsized(Pairs):
    def __len__(self) -> int:
        raise NotImplementedError


def unsized() -> DataLoader[Any]:
    return DataLoader(Unsized(), 3, sampler=SubsetRandomSampler(range(SAMPLES)))


class DrawnOrder(Sampler[int]):
    """An order that NumPy and Python draw."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield (random.randrange(SAMPLES) + int(np.random.randint(SAMPLES))) % SAMPLES


class Backwards(Sampler[int]):
    """Positions from the end, once it is told so."""

    back = False

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from range(-1, -SAMPLES - 1, -1) if self.back else range(SAMPLES)


def backwards() -> DataLoader[Any]:
    return DataLoader(Pairs(), batch_size=3, sampler=Backwards())


def drawn_order() -> DataLoader[Any]:
    return DataLoader(Pairs(), batch_size=3, sampler=DrawnOrder())


def by(collate: Any, kind: Any = Pairs) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(kind(), batch_size=3, shuffle=True, collate_fn=collate)


def columns(samples: Any) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


def as_tuple(samples: Any) -> Any:
    images, labels = zip(*samples, strict=True)
    return torch.stack(labels), [torch.stack(images, dim=0)]


def part(samples: Any, at: int) -> Tensor:
    return torch.stack([sample[at] for sample in samples])


def by_part(samples: Any) -> Any:
    return part(samples, SHIFT), part(samples, 1)


def by_number(samples: Any) -> Any:
    return part(samples, 0) if len(samples) > 1 else part(samples, 1)


def renamed(samples: Any) -> Any:
    return default_collate([{"x": one["image"], "y": [one["label"]]} for one in samples])


def all_keys(samples: Any) -> Any:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def stacking(at: int) -> tuple[Any, Any]:
    """A function that makes minibatches by a number around it, and one that sets this number."""

    def enclosed(samples: Any) -> Any:
        return part(samples, at)

    def set_enclosed(_: Any) -> None:
        nonlocal at
        at = 0

    return enclosed, set_enclosed


enclosed, set_enclosed = stacking(1)


def by_default(samples: Any, first: int = 0, *, second: int = 1) -> Any:
    return part(samples, first), part(samples, second)


def set_default(_: Any) -> None:
    by_default.__defaults__ = (1,)


def set_named_default(_: Any) -> None:
    by_default.__kwdefaults__ = {"second": 0}


STACKED: dict[str, Callable[[], DataLoader[Any]]] = {
    **{function.__name__: by(function) for function in (enclosed, by_default)},
    **{function.__name__: by(function) for function in (columns, as_tuple, by_part, by_number)},
    **{function.__name__: by(function, Dicts) for function in (renamed, all_keys)},
    "lambda": by(lambda samples: torch.stack([y for _, y in samples])),
    "both": by(lambda samples: (part(samples, 0), part(samples, 0)), Chosen),
}
ROWS: dict[str, Callable[[], DataLoader[Any]]] = {
    **STACKED,
    **{kind.__name__: own(kind) for kind in (Pairs, Dicts, Nested, EverySecond, Alone, Chosen)},
    **{
        make.__name__: make
        for make in (weighted, subset, generated, chosen, longer_than_it_says, unsized)
    },
}


# --- others ---------------------------------------------------------------------------------------


class Noisy(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position] + torch.randn(2, 3), self.y[position]


class FromNumPy(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position] * float(np.random.rand()) + random.random(), self.y[position]


class Sometimes(Pairs):
    """Almost always the row at its position."""

    def __getitem__(self, position: int) -> Any:
        return self.x[(position + int(torch.rand(()) < 1e-9)) % len(self.y)], self.y[position]


TOOLS: Any = ModuleType("torch.tools")
"""A module that isn't found by its name."""
TOOLS.SHIFT = 0


class Tooled(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position + TOOLS.SHIFT], self.y[position]


class Reversed(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[SAMPLES - 1 - position], self.y[position]


class LastDiffers(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position] if position < SAMPLES - 1 else 2 * self.x[position]


class FormDiffers(Pairs):
    def __getitem__(self, position: int) -> Any:
        if position == SAMPLES - 1:
            return self.x[position], self.x[position, 0, 0].long()
        return self.x[position], self.y[position]


class Counting(Pairs):
    count = 0

    def __getitem__(self, position: int) -> Any:
        self.count += 1
        return self.x[position], torch.tensor(self.count)


class CountingRows(Pairs):
    """Rows, but not always the same."""

    count = 0

    def __getitem__(self, position: int) -> Any:
        self.count += 1
        return self.x[position] if self.count < 2 * SAMPLES else self.z[position]


class Writing(Pairs):
    def __getitem__(self, position: int) -> Any:
        self.x[position] += 1
        return self.x[position]


class Numbers(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position], position


class Texts(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position], "text"


class Parts(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position, :1], self.y[position]


class Viewed(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x[position].view(torch.int32), self.y[position]


class Sides(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.x = self.x[:, :, :2].contiguous()

    def __getitem__(self, position: int) -> Any:
        return self.x[position].t(), self.y[position]


class Longer(Pairs):
    def __getitem__(self, position: int) -> Any:
        if position == SAMPLES - 1:
            return self.x[position], self.y[position], self.x[position]
        return self.x[position], self.y[position]


class Turned(Pairs):
    def __getitem__(self, position: int) -> Any:
        return self.x.transpose(0, 2)[0, :, position], self.y[position]


class Permuted(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.x = self.x.transpose(1, 2)


class Trained(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.x.requires_grad_()


class Inferred(Pairs):
    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.x = self.x.clone()


class Listed(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.every = list(self.x)

    def __getitem__(self, position: int) -> Any:
        return self.every[position]


class ByList(Pairs):
    """Its samples are rows, until the number in a list is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = [0]

    def __getitem__(self, position: int) -> Any:
        return self.x[position - self.shifts[0]]


class ByPartial(Pairs):
    """The same, with a function's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.select = partial(torch.select, dim=0)

    def __getitem__(self, position: int) -> Any:
        return self.select(self.x, index=position)


class Asking(Pairs):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Begun(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.whole = self.x[:4], self.x

    def __getitem__(self, position: int) -> Any:
        return self.whole[position] if len(self.begin) else self.begin[position]


class Keyed(Pairs):
    def __getitem__(self, position: Any) -> Any:
        return self.x[len(position)], self.y[len(position)]


def keyed() -> DataLoader[Any]:
    keys: Any = ["a" * length for length in range(SAMPLES)]
    return DataLoader(Keyed(), 3, sampler=SubsetRandomSampler(keys))


class Bare(Pairs):
    def __getitem__(self, position: int) -> Any:
        return {}


def bare() -> DataLoader[Any]:
    return DataLoader(Subset(Bare(), range(2 * SAMPLES)), 3, shuffle=True)


def begun() -> DataLoader[Any]:
    return DataLoader(Begun(), batch_size=4)


def longer() -> DataLoader[Any]:
    return DataLoader(Longer(), batch_size=1, shuffle=True)


def batched() -> DataLoader[Any]:
    def collate(samples: list[Any]) -> Any:
        return default_collate(samples[::-1])

    return DataLoader(Pairs(), 3, shuffle=True, collate_fn=collate)


def noisy(samples: Any) -> Any:
    return default_collate(samples)[0] + torch.randn(())


def noisy_by_numpy(samples: Any) -> Any:
    return default_collate(samples)[0] + np.random.rand() + random.random()


def labels_as_numbers(samples: Any) -> Any:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def sorted_by_labels(samples: Any) -> Any:
    return default_collate(sorted(samples, key=lambda sample: sample[1]))


def chosen_by_numbers(samples: Any) -> Any:
    first = samples[0][0][0, 0]
    return part(samples, 0) if first > 0 else part(samples, 1)


def scaled(samples: Any) -> Any:
    return part(samples, 0) * 2


def twice(samples: Any) -> Any:
    images = part(samples, 0)
    return images, images


def counted(samples: Any) -> Any:
    return part(samples, 0), len(samples)


def text(samples: Any) -> Any:
    return {"x": part(samples, 0), f"{samples[0][1]}": part(samples, 1)}


def without_the_first(samples: Any) -> Any:
    return part(samples[1:] or samples, 0)


def along_the_last(samples: Any) -> Any:
    return torch.stack([x for x, _ in samples], -1)


def mixed(samples: Any) -> Any:
    return torch.stack([one[0] if at else samples[-1][0] for at, one in enumerate(samples)])


def written_to(samples: Any) -> Any:
    samples[0][0].add_(1)
    return part(samples, 0)


def with_gradients(samples: Any) -> Any:
    return part(samples, 0).requires_grad_()


def the_first(samples: Any) -> Any:
    return samples[0]


def around(samples: Any) -> Any:
    return AROUND.pop() if len(AROUND) > SAMPLES else part(samples, 0)


AROUND: list[int] = []


class Called:
    def __call__(self, samples: Any) -> Any:
        return part(samples, 0)


class CalledUnhashed(Called):
    __hash__ = None  # type: ignore[assignment]


READ: dict[str, Callable[[], DataLoader[Any]]] = {
    function.__name__: by(function)
    for function in (
        *(noisy, noisy_by_numpy, labels_as_numbers, sorted_by_labels, chosen_by_numbers, scaled),
        *(twice, counted, text, without_the_first, along_the_last, mixed, written_to, the_first),
        *(around, with_gradients),
    )
} | {
    "partial": by(partial(part, at=0)),
    "called": by(Called()),
    "called, unhashed": by(CalledUnhashed()),
    "noisy samples": by(by_part, Noisy),
    "samples of numbers": by(the_first, Numbers),
}
"""Functions that do more than to stack, or may."""
OTHERS: dict[str, Callable[[], DataLoader[Any]]] = (
    READ
    | {
        kind.__name__: own(kind)
        for kind in (
            *(
                Noisy,
                FromNumPy,
                Sometimes,
                Reversed,
                LastDiffers,
                FormDiffers,
                Counting,
                CountingRows,
            ),
            *(
                Writing,
                Numbers,
                Texts,
                Parts,
                Viewed,
                Sides,
                Turned,
                Permuted,
                Trained,
                Inferred,
                Listed,
                ByList,
                ByPartial,
                Asking,
                Tooled,
            ),
        )
    }
    | {
        "keyed": keyed,
        "batched": batched,
        "bare": bare,
        "drawn_order": drawn_order,
        "begun": begun,
        "longer": longer,
    }
)


# --- comparisons ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = (HERE, "SHIFT"), (HERE, "label"), (HERE, "part"), (Pairs, "__getitem__")
    defaults = ((by_default, "__defaults__"), (by_default, "__kwdefaults__"))
    cell = enclosed.__closure__[0]
    for owner, name in (*owners, *defaults, (columns, "__code__"), (cell, "cell_contents")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def count_back(loader: Any) -> None:
    loader.sampler.indices = [*range(-1, -SAMPLES - 1, -1)]


Change = Callable[[Any], Any]


def epochs(
    make: Callable[[], DataLoader[Any]],
    monkeypatch: pytest.MonkeyPatch,
    gathers: bool,
    change: Change = lambda _: None,
    within: int | None = None,
) -> tuple[list[Any], int]:
    """Read some epochs, and change something before the last one, or within it.

    Returns:
        The minibatches, and how many were gathered.
    """
    count = 0
    gathered = rows.Source.gathered

    def counting(self: Any, positions: list[int], form: Any) -> Any:
        nonlocal count
        found = gathered(self, positions, form)
        count += found is not None
        return found

    loader, found = make(), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(rows.Source, "gathered", counting)
        if not gathers:
            patch.setattr(minibatches, "row_epoch", lambda *_: None)
        for epoch in range(EPOCHS):
            if epoch == EPOCHS - 1 and within is None:
                change(loader)
            for number, batch in enumerate(fetch(loader, epoch, len(loader), "a")):
                found.append(batch)
                if epoch == EPOCHS - 1 and number == within:
                    change(loader)
    return found, count


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same([*found.values()], [*expected.values()])
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_rows_are_gathered(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = epochs(make, monkeypatch, gathers=True)
    assert_same(found, epochs(make, monkeypatch, gathers=False)[0])
    # In the first epoch some samples may come twice.
    assert count >= (EPOCHS - 2) * len(make())


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_others_are_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    found, count = epochs(make, monkeypatch, gathers=True)
    assert_same(found, epochs(make, monkeypatch, gathers=False)[0])
    assert count <= len(make())  # until one was found that is no row


def data_of(loader: Any) -> Any:
    data = loader.dataset
    while isinstance(data, Subset):
        data = data.dataset
    return data


def write(loader: Any) -> None:
    data_of(loader).x[3] = 7.0


def write_unseen(loader: Any) -> None:
    data_of(loader).numbers[:] = 5.0


def replace_tensor(loader: Any) -> None:
    data_of(loader).x = data_of(loader).x + 1


def replace_memory(loader: Any) -> None:
    data_of(loader).x.data = data_of(loader).x + 1


def shrink(loader: Any) -> None:
    data_of(loader).y.resize_(SAMPLES - 1).resize_(SAMPLES).fill_(3)


def set_last(loader: Any) -> None:
    data_of(loader).last = True


def set_transform(loader: Any) -> None:
    data_of(loader).transform = torch.neg


def set_shift(_: Any) -> None:
    HERE.SHIFT = -1


def replace_label(_: Any) -> None:
    HERE.label = lambda labels, position: labels[position] + 10


def replace_code(_: Any) -> None:
    Pairs.__getitem__ = Nested.__getitem__  # type: ignore


def become_another(loader: Any) -> None:
    data_of(loader).__class__ = Dicts


def choose_others(loader: Any) -> None:
    loader.dataset.indices[:] = [0, 1, 1, 0]


def stack_otherwise(loader: Any) -> None:
    loader.collate_fn = lambda samples: default_collate(samples[::-1])


def stack_others(_: Any) -> None:
    HERE.SHIFT = 1


def replace_part(_: Any) -> None:
    HERE.part = lambda samples, at: torch.stack([one[1 - at] for one in samples])


def replace_columns(_: Any) -> None:
    columns.__code__ = as_tuple.__code__


def draw_otherwise(loader: Any) -> None:
    loader.generator = None


CHANGES: dict[str, tuple[Callable[[], DataLoader[Any]], Change]] = {
    f"{number} {change.__name__}": (make, change)
    for number, (make, change) in enumerate(
        (
            *((own(Pairs), one) for one in (write, write_unseen, replace_tensor, replace_memory)),
            *((own(Chosen), one) for one in (set_last, set_transform, set_shift, replace_label)),
            *((own(Pairs), one) for one in (replace_code, become_another, stack_otherwise, shrink)),
            *((by(by_part), one) for one in (stack_others, replace_part, stack_otherwise)),
            *((by(columns), one) for one in (replace_columns, write, write_unseen)),
            *((by(by_default), one) for one in (set_default, set_named_default)),
            (by(enclosed), set_enclosed),
            *((subset, choose_others), (generated, draw_otherwise), (chosen, count_back)),
        )
    )
}


WHEN_IT_BEGINS = (stack_otherwise, draw_otherwise, count_back)
"""What a DataLoader reads when an epoch begins."""


@pytest.mark.parametrize(
    ("make", "change", "within"),
    [
        pytest.param(make, change, within, id=f"{name} {within}")
        for name, (make, change) in CHANGES.items()
        for within in (None, 0)
        if within is None or change not in WHEN_IT_BEGINS
    ],
)
def test_what_changes_is_seen(
    make: Any, change: Change, within: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    HERE.SHIFT = 0
    found, count = epochs(make, monkeypatch, True, change, within)
    assert count >= (EPOCHS - 3) * len(make())
    HERE.SHIFT, HERE.label, Pairs.__getitem__ = 0, LABEL, GETITEM  # type: ignore[method-assign]
    HERE.part, columns.__code__ = PART, COLUMNS
    by_default.__defaults__, by_default.__kwdefaults__ = (0,), {"second": 1}
    enclosed.__closure__[0].cell_contents = 1
    assert_same(found, epochs(make, monkeypatch, False, change, within)[0])
    unchanged = epochs(make, monkeypatch, gathers=False)[0]
    with pytest.raises(AssertionError):
        assert_same(found, unchanged)


LABEL, GETITEM = label, Pairs.__getitem__
PART, COLUMNS = part, columns.__code__


# --- samples that are no rows, by code that is known ----------------------------------------------


class Scaled(Pairs):
    """Samples that are computed, and read what callbacks set."""

    def __getitem__(self, position: int) -> Any:
        image = self.x[position] * 2
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.y[position])


@pytest.mark.parametrize(
    ("make", "known"),
    [
        *((own(kind), True) for kind in (Scaled, Noisy, Reversed, Numbers, Parts)),
        *((by(function), True) for function in (noisy, labels_as_numbers, twice)),
        *((make, False) for make in (own(FromNumPy), own(Counting), by(noisy_by_numpy))),
    ],
)
def test_known_samples_are_read_without_the_loader(
    make: Any, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which costs as much as to read them. Only torch's generators are seeded for these."""
    seeded = list[bool]()
    usual = seeded_by

    def noting(key: int | None, everything: bool = False) -> Any:
        seeded.append(everything)
        return usual(key, everything)

    torch.manual_seed(0)
    monkeypatch.setattr(minibatches, "seeded", noting)
    loader = make()
    monkeypatch.setattr(type(loader), "__iter__", counting_of(loader, type(loader).__iter__))
    for epoch in range(2):
        assert len(list(fetch(loader, epoch, len(loader), "a"))) == len(loader)
    assert len(seeded) == 2 * len(loader)
    assert any(seeded) != known
    assert vars(loader).get("begun", 0) == (0 if known else 2)


def counting_of(loader: Any, begin: Any) -> Any:
    def counting(self: Any) -> Any:
        if self is loader:
            vars(self)["begun"] = vars(self).get("begun", 0) + 1
        return begin(self)

    return counting


def add_noise(image: Tensor) -> Tensor:
    return image + float(np.random.rand()) + random.random()


@pytest.mark.parametrize("within", [None, 0])
def test_all_generators_are_seeded_once_code_has_changed(
    within: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(loader: Any) -> None:
        data_of(loader).transform = add_noise

    found, count = epochs(own(Scaled), monkeypatch, True, change, within)
    assert count == 0
    assert_same(found, epochs(own(Scaled), monkeypatch, False, change, within)[0])
    with pytest.raises(AssertionError):
        assert_same(found, epochs(own(Scaled), monkeypatch, False)[0])
