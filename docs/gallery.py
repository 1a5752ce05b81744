"""Make the pictures of docs/gallery.md: ``python -m docs.gallery``.

Every callback that draws is run on the digits; the page of a comparison and TensorBoard are
photographed by a headless Chromium, which has to be installed.
"""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_pfl import FederatedDataModule, FederatedStrategy, compare
from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.data import ClassesPerClient, Digits, FeatureSkew
from lightning_pfl.inspect import (
    ClientGraph,
    ClientHeatMap,
    ClientHistogram,
    ClientMap,
    ClusterMonitor,
    PairwiseDistance,
    PartitionPicture,
    PriorMonitor,
)
from lightning_pfl.methods import IFCA, FedAvg, FedMAP, FedRep, FedU, LocalOnly
from lightning_pfl.methods.base import Method
from lightning_pfl.models import DigitsMLP
from lightning_pfl.priors import DiagonalGaussianPrior

FIGURES = Path(__file__).resolve().parent / "figures"
ROUNDS, SMALL_ROUNDS = 20, 3
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: The pages, and the sizes of the windows in which they are photographed.
WINDOWS = {"compare.png": (1300, 1800), "compare_phone.png": (500, 1600)}
BOARD_WINDOW = (1200, 1420)
#: Each kept picture, and the run and the file that it is.
KEPT = {
    "partition.png": ("FedRep", "partition-train-*.png"),
    "client_histogram.png": ("FedRep", "clients-val_acc-sorted-*.png"),
    "client_rounds.png": ("FedRep", "clients-val_acc-rounds-*.png"),
    "client_heat_map.png": ("FedRep", "clients-val_acc-map-*.png"),
    "client_map.png": ("FedRep", "clients-models-*.png"),
    "distance.png": ("FedRep", "distance-*.png"),
    "client_map_of_clusters.png": ("IFCA", "clients-models-*.png"),
    "clusters.png": ("IFCA", "clusters-*.png"),
    "prior_weights.png": ("FedMAP", "prior-weights-rounds-*.png"),
    "prior_variances.png": ("FedMAP", "prior-variance-*.png"),
    "graph.png": ("FedU", "graph-*.png"),
}


def train(
    name: str,
    method: Method,
    logs: Path,
    rounds: int,
    *callbacks: Any,
    partition: Any = None,
    clients: int = 24,
    seed: int = 0,
) -> None:
    """Train on the digits, with logs in ``logs/name/seed<seed>``."""
    L.seed_everything(seed, verbose=False)
    data = FederatedDataModule(
        Digits(), partition or ClassesPerClient(2), clients, val_fraction=0.2
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=FederatedStrategy(method, participation=0.5),
        logger=TensorBoardLogger(logs, name, f"seed{seed}"),
        callbacks=[*callbacks],
        accelerator="cpu",
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsMLP(lr=0.1), data)


def train_all(logs: Path, rounds: int) -> None:
    """Train what the pictures are of; the comparison is of those in ``logs/compared``."""
    for seed in (0, 1):
        compared = logs / "compared"
        pictures = [
            ClientHeatMap(), ClientHistogram(), ClientMap(), PairwiseDistance(), PartitionPicture(),
        ]  # fmt: skip
        own = pictures if seed == 0 else []
        train("FedRep", FedRep(head_epochs=4), compared, rounds, *own, seed=seed)
        tuned = HeadFineTuning(epochs=4)
        train("FedAvg", FedAvg(local_epochs=5), compared, rounds, tuned, seed=seed)
        train("LocalOnly", LocalOnly(local_epochs=5), compared, rounds, seed=seed)
    rotated: dict[str, Any] = {"partition": FeatureSkew("rotate90"), "clients": 20}
    found = [ClientMap("all"), ClusterMonitor(4)]
    train("IFCA", IFCA(4, local_epochs=2), logs, rounds, *found, **rotated)
    train("FedMAP", FedMAP(DiagonalGaussianPrior(), local_epochs=2), logs, rounds, PriorMonitor())
    train("FedU", FedU("small_world"), logs, rounds, ClientGraph())


def photograph(address: str, window: tuple[int, int], path: Path, wait: int = 0) -> None:
    """Take a picture of a page.

    Args:
        address: Its address.
        window: Width and height in pixels.
        path: The file.
        wait: Milliseconds of the page's own clock to wait for its scripts.
    """
    size = ",".join(map(str, window))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size={size}", f"--screenshot={path}", f"--virtual-time-budget={wait}"]
    command = [str(CHROMIUM), *options[: None if wait else -1], address]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


@contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """Start TensorBoard on this machine; gives its address when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # From the folder above, as the page shows the path that it is given.
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logs.name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load_fast", "false"]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, cwd=logs.parent, stdout=quiet, stderr=quiet)
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(f"{address}data/runs", timeout=5) as answer:
                    if answer.read() not in (b"[]", b""):
                        break
            except OSError:
                pass
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def make(figures: Path, logs: Path, rounds: int = ROUNDS) -> list[Path]:
    """Make all pictures.

    Args:
        figures: Folder of the pictures.
        logs: Folder of the runs.
        rounds: Communication rounds of each run.

    Returns:
        The files.
    """
    figures.mkdir(parents=True, exist_ok=True)
    train_all(logs, rounds)
    made = []
    for name, (run, pattern) in KEPT.items():
        (folder,) = logs.rglob(f"{run}/seed0/pictures")
        shutil.copy(sorted(folder.glob(pattern))[-1], figures / name)
        made.append(figures / name)
    page = logs / "compare.html"
    compare(logs / "compared").to_html(page)
    for name, window in WINDOWS.items():
        photograph(page.as_uri(), window, figures / name)
        made.append(figures / name)
    with tensorboard(logs / "compared") as address:
        path = figures / "tensorboard.png"
        photograph(f"{address}#custom_scalars", BOARD_WINDOW, path, wait=30_000)
        made.append(path)
    return made


def main() -> None:
    """Write the pictures to docs/figures."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as logs:
        for path in make(FIGURES, Path(logs)):
            print(f"written: {path.name}")


if __name__ == "__main__":
    main()
