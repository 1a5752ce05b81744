"""The command ``lightning-pfl adapt``: a new client's model from a checkpoint and its data."""

from __future__ import annotations

import copy
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pfl._lightning import copy_apart
from lightning_pfl.cli.parser import in_a_line, read_sections
from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.files import atomic_file
from lightning_pfl.core.mixture import MixedForward
from lightning_pfl.core.randomness import derive
from lightning_pfl.data.datamodule import FederatedDataModule
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.data.holdout import cut
from lightning_pfl.data.sources.base import Source, SourceData
from lightning_pfl.data.sources.table import HuggingFaceTable
from lightning_pfl.federation.load import SavedClients, load_clients
from lightning_pfl.federation.new_clients import Start
from lightning_pfl.federation.shards import is_sharded
from lightning_pfl.methods.base import Method


class _TensorFile(Source):
    """The samples in a file that ``torch.save`` wrote: a tuple or list of tensors.

    Args:
        path: The file. Each tensor has one row per sample, as the module's batches have them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> SourceData:
        """Read the file; code in it isn't run.

        Raises:
            ValueError: If it holds something else.
        """
        given = torch.load(self.path, map_location="cpu", weights_only=True)
        fields = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not all(isinstance(field, Tensor) and field.ndim for field in fields):
            raise ValueError(
                f"Expected {str(self.path)!r} to hold a tuple of tensors with one row per sample, "
                f"but got a {type(given).__name__}. Use torch.save((x, y), PATH)."
            )
        labels = fields[-1].numpy() if fields[-1].ndim == 1 else torch.zeros(len(fields[0])).numpy()
        return SourceData(fields, labels)


def adapt_parser() -> ArgumentParser:
    """Make the parser of ``lightning-pfl adapt``."""
    parser = ArgumentParser(
        "lightning-pfl adapt",
        allow_abbrev=False,
        description="Fit a model for a client that never took part, from a checkpoint and the "
        "client's own data alone. Prints the model's test values and writes its state_dict.",
    )
    add = parser.add_argument
    add("--ckpt", required=True, type=Path, metavar="FILE", help="the run's checkpoint")
    add(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help="the client's samples: a table with the columns of the run's, or a .pt file of a "
        "tuple of tensors, as the module's batches have them",
    )
    add(
        "--config",
        action="append",
        type=Path,
        metavar="FILE",
        help="the run's recipe (default: config.yaml beside the checkpoint or above it)",
    )
    add(
        "--out",
        type=Path,
        default=Path("adapted.pt"),
        metavar="FILE",
        help="(default: %(default)s)",
    )
    add("--test_fraction", type=float, default=0.2, help="share held out, 0: none (default: 0.2)")
    add("--epochs", type=int, help="passes over the samples (default: 10)")
    add("--steps", type=int, help="optimizer steps, instead of passes")
    add(
        "--scope",
        default="personal",
        help="what trains: personal, all, or names (default: personal)",
    )
    add("--start", default="personal", choices=get_args(Start), help="(default: personal)")
    add("--lr", type=float, help="learning rate (default: the checkpoint's)")
    add("--batch_size", type=int, help="(default: the recipe's)")
    add("--classes", help="text labels, with commas, in the order of the model's outputs")
    add("--seed", type=int, default=0, help="of the held-out share (default: 0)")
    return parser


def run_adapt(words: Sequence[str]) -> None:
    """Fit a model for a client that never took part, print how good it is, and write it.

    Args:
        words: The command line after ``lightning-pfl adapt``.
    """
    parser = adapt_parser()
    given = parser.parse_args(words)
    try:
        if not 0 <= given.test_fraction < 1:
            raise ValueError(
                "Expected --test_fraction to be in [0, 1), but got "
                f"{given.test_fraction}. Use 0 to train on all samples."
            )
        clients, train, test = _read(given)
        model = clients.adapt(
            train,
            epochs=10 if given.epochs is None and given.steps is None else given.epochs,
            steps=given.steps,
            scope=given.scope,
            lr=given.lr,
            start=cast(Start, given.start),
        )
        if isinstance(model.__dict__.get("forward"), MixedForward):
            raise MisconfigurationException(
                f"Expected a method whose models are one state_dict, but got "
                f"{type(clients.method).__name__}, whose clients predict by several. Use "
                "`load_clients(path, module, method).adapt(loader)` in Python."
            )
        _print_values(clients, model, test)
        with atomic_file(given.out) as file:
            torch.save(model.state_dict(), file)
    except ClientError as error:
        parser.error(
            f"Expected samples in --data that the run's module takes, but got {str(given.data)!r}, "
            f"with which {error}"
        )
    except (ValueError, OSError, TypeError, RuntimeError, MisconfigurationException) as error:
        line = in_a_line(error)
        if line is None and not isinstance(error, OSError):
            raise
        parser.error(line or str(error))
    print(f"written: {given.out}, a state_dict of {type(model).__name__}")


def _read(given: Namespace) -> tuple[SavedClients, FederatedTensorDataset, FederatedTensorDataset]:
    """Read the checkpoint and the new client's samples, to train on and to test with."""
    if not given.ckpt.is_file() and not is_sharded(given.ckpt):
        raise FileNotFoundError(
            f"Expected --ckpt to be a checkpoint, but got {str(given.ckpt)!r}, which is none. "
            "Runs write theirs to `checkpoints/` in their log folder."
        )
    configs = given.config or [_config_of(given.ckpt)]
    kinds = {"model": LightningModule, "method": Method, "data": LightningDataModule}
    parser, sections = read_sections(configs, kinds)
    made = parser.instantiate_classes(sections)
    for name in ("model", "method"):
        if made.get(name) is None:
            raise ValueError(
                f"Expected a recipe with the section `{name}`, but got {str(configs[-1])!r} "
                "without it. Give the recipe of the run: --config FILE."
            )
    clients = load_clients(given.ckpt, made.model, made.method)
    run = made.data if isinstance(made.get("data"), FederatedDataModule) else None
    loaded = _source(given, None if run is None else run.source).load()
    everything = [np.arange(len(loaded.labels))]
    rng = np.random.default_rng(derive(given.seed, "data", "test"))
    how = None if run is None else run.cut
    parts = cut(everything, loaded.labels, given.test_fraction, rng, how, loaded.columns)
    size = given.batch_size or (10 if run is None else run.batch_size)
    sizes = (size, 256 if run is None else run.eval_batch_size)
    train, test = (
        FederatedTensorDataset(
            loaded.fields,
            [torch.from_numpy(part) for part in rows],
            names=["new client"],
            batch_size=batch,
            transform=transform,
            augment=augment,
        )
        for rows, batch, transform, augment in zip(
            parts,
            sizes,
            (loaded.transform, loaded.eval_transform or loaded.transform),
            (loaded.augment, None),
            strict=True,
        )
    )
    train.shuffle = True
    return clients, train, test


def _source(given: Namespace, run: Source | None) -> Source:
    """Make the source of the new client's samples, by the settings of the run's table."""
    if not given.data.is_file():
        raise FileNotFoundError(f"Expected --data to be a file, but got {str(given.data)!r}.")
    if given.data.suffix == ".pt":
        if given.classes is not None:
            raise ValueError(
                "Expected --classes with a table only, but got it with a .pt file. Leave it out."
            )
        return _TensorFile(given.data)
    if not isinstance(run, HuggingFaceTable):
        raise ValueError(
            f"Expected --data to be a .pt file, as the run's source is a {type(run).__name__} and "
            f"no HuggingFaceTable, but got {str(given.data)!r}. Write the samples, as the module's "
            "batches have them, with torch.save((x, y), PATH)."
        )
    table = copy.copy(run)
    table.path, table.name, table.client, table.test_split = str(given.data), None, None, None
    table.train_split = "train"
    if given.classes is not None:
        table.classes = given.classes.split(",")
    if table.classes is None and table.has_text_labels():
        raise ValueError(
            f"Expected the order of the run's classes for the text labels in {table.label!r}, as a "
            "client may lack some, but got none. Give it: --classes better,worse."
        )
    return table


def _config_of(ckpt: Path) -> Path:
    """Find the recipe that a run wrote into its log folder.

    Raises:
        ValueError: If there is none.
    """
    for folder in (ckpt.parent, ckpt.parent.parent):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise ValueError(
        f"Expected config.yaml beside {str(ckpt)!r} or above it, but got none there. Give the "
        "recipe of the run: --config FILE."
    )


def _print_values(
    clients: SavedClients, model: LightningModule, test: FederatedTensorDataset
) -> None:
    """Print what the module logs on the held-out samples, also for the global model if any."""
    step = "test" if is_overridden("test_step", model) else "validation"
    if not len(test.indices[0]) or not is_overridden(f"{step}_step", model):
        return
    models = {"adapted": model}
    if clients.method.global_model(clients.server) is not None:
        shared = models["global"] = copy_apart(model)
        shared.load_state_dict(clients.global_state_dict())
    values = {name: _values(one, test, step) for name, one in models.items()}
    keys = [*dict.fromkeys(key for found in values.values() for key in found)]
    title = f"On {len(test.indices[0])} samples that were held out"
    table = Table("model", *keys, box=box.SIMPLE_HEAD, title=title)
    for name, found in values.items():
        table.add_row(name, *(f"{found[key]:.4f}" if key in found else "" for key in keys))
    Console().print(table)


def _values(model: LightningModule, test: FederatedTensorDataset, step: str) -> dict[str, float]:
    """Evaluate a model as Lightning does."""
    positions: Any = test.indices[0].tolist()
    loader = DataLoader(
        positions,
        batch_size=test.batch_size,
        collate_fn=lambda rows: test.gather(torch.tensor(rows)),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run = trainer.test if step == "test" else trainer.validate
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        found = run(model, loader, verbose=False)
    return {key: float(value) for key, value in found[0].items()}
