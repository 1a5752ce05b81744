"""What every test stands on: one thread, a fixed seed, and tiny data of the true layout."""

import gc
import gzip
import os
import random
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

CLASSES = 10
TRAIN_PER_CLASS, TEST_PER_CLASS = 60, 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run of the tests of methods choose the engine."""
    parser.addoption(
        "--engine", choices=("vectorized", "sequential", "reference"), default="vectorized"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but some cases of each sweep as slow, unless `-k` says which are wanted."""
    if config.option.keyword:
        return
    for count, cases in sweeps(items):
        chosen = spread(len(cases), count)
        for at, item in enumerate(cases):
            if at not in chosen:
                item.add_marker("slow")


def sweeps(items: Iterable[pytest.Item]) -> Iterator[tuple[int, list[pytest.Item]]]:
    """Iterate over the sweeps: how many cases of each run, and its cases but the slow ones."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in found.values():
        marker = cases[0].get_closest_marker("sweep")
        assert marker is not None
        yield marker.args[0], cases


def spread(total: int, count: int) -> set[int]:
    """Choose positions of a list: one of each of as many parts, and always the same.

    By chance, as a fixed distance may be a period of the list, such as one with each engine twice.
    """
    chance, count = random.Random(0), min(total, count)
    ends = [part * total // count for part in range(count + 1)]
    return {chance.randrange(first, end) for first, end in pairwise(ends)}


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what the imports made: most of all objects there are."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _session() -> Iterator[None]:
    """Prepare a process for its tests.

    Packages are imported here, and not above, so that the process that only hands out the tests
    doesn't wait for them.
    """
    from tests.engine import pretended_device

    pretended_device.register()
    # Every Trainer looks for callbacks in all installed packages, which takes as long as a round.
    with patch("lightning.fabric.utilities.registry.entry_points", cache(entry_points)):
        yield


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """Start from the same seed, and leave no seed behind for the next test."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture
def device() -> Iterator[Any]:
    """A pretended device, for the time of a test."""
    from tests.engine.pretended_device import PretendedDevice, pretended_accelerator

    pretended_accelerator()
    with PretendedDevice() as mode:
        yield mode


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write unsigned bytes as Fashion-MNIST's files hold them."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes(), compresslevel=1))


@pytest.fixture(autouse=True)
def programs_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `engine="auto"` choose as for ten clients in a program: those of tests are fewer."""
    from lightning_pfl.engine.steps import clients_served

    def many(*args: Any, **settings: Any) -> tuple[float, bool]:
        served, grouped = clients_served(*args, **settings)
        return (served if grouped else max(10.0, served)), grouped

    monkeypatch.setattr("lightning_pfl.engine.probe.clients_served", many)


@pytest.fixture
def clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `engine="auto"` run clients at once where it can, as few small ones of unequal sizes."""
    for name in ("batching_pays", "evaluating_pays"):
        monkeypatch.setattr(f"lightning_pfl.engine.probe.{name}", lambda *_: True)


@pytest.fixture(scope="session")
def fashion_mnist_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Fashion-MNIST: noise whose brightness tells the class."""
    folder = tmp_path_factory.mktemp("fashion_mnist")
    rng = np.random.default_rng(0)
    for name, per_class in (("train", TRAIN_PER_CLASS), ("t10k", TEST_PER_CLASS)):
        labels = rng.permutation(np.repeat(np.arange(CLASSES, dtype=np.uint8), per_class))
        noise = rng.integers(0, 20, (len(labels), 28, 28))
        images = (noise + 20 * labels[:, None, None]).astype(np.uint8)
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return folder
