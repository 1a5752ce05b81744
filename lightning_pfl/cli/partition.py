"""The command ``lightning-pfl partition``: who holds what for the data section of a recipe."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningDataModule
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightning_pfl.cli.parser import in_a_line, read_sections
from lightning_pfl.data.datamodule import FederatedDataModule
from lightning_pfl.data.datasets import FederatedDataset, label_counts
from lightning_pfl.data.partition.labels import ClassesPerClient

MOST_CLASSES = 20
"""Largest number of classes with a column each."""
MOST_CLIENTS = 100
"""Largest number of clients with a row each."""


def partition_parser() -> ArgumentParser:
    """Make the parser of ``lightning-pfl partition``."""
    parser = ArgumentParser(
        "lightning-pfl partition",
        allow_abbrev=False,
        description="Print who holds what: each client's samples by class, for the data section of "
        "a recipe. Options --data.NAME VALUE change the section, as for fit.",
    )
    add = parser.add_argument
    add("--config", action="append", required=True, type=Path, metavar="FILE", help="as for fit")
    add("--split", choices=["train", "val", "test"], default="train", help="(default: train)")
    add("--picture", type=Path, metavar="FILE", help="write a picture, such as partition.png")
    return parser


def run_partition(words: Sequence[str]) -> None:
    """Print how many samples of each class every client has, and draw it if asked to.

    Args:
        words: The command line after ``lightning-pfl partition``.
    """
    parser = partition_parser()
    given, rest = parser.parse_known_args(words)
    try:
        module = make_data(given.config, rest)
        module.prepare_data()
        module.setup("fit" if given.split != "test" else "test")
        data = getattr(module, f"{given.split}_dataloader")()
        print_counts(data)
        if isinstance(module.partition, ClassesPerClient):
            print(
                f"ClassesPerClient({module.partition.classes_per_client}) may draw a class twice "
                "for a client, which then has fewer classes, and more samples of that one"
            )
        if given.picture is not None:
            draw_partition(module, given.split, given.picture)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, TypeError) as error:
        parser.error(in_a_line(error) or str(error))


def make_data(configs: Sequence[Path], options: Sequence[str]) -> FederatedDataModule:
    """Make the data module of some recipes' data sections and options.

    Raises:
        ValueError: If it is no FederatedDataModule.
    """
    parser, given = read_sections(configs, {"data": LightningDataModule}, options)
    made = parser.instantiate_classes(given).data
    if not isinstance(made, FederatedDataModule):
        raise ValueError(
            f"Expected a FederatedDataModule in the data section, but got {type(made).__name__}. "
            "Only it draws a partition."
        )
    return made


def print_counts(data: FederatedDataset) -> None:
    """Print a table of samples, by client and class where there are classes."""
    counts = label_counts(data)
    classes = [] if counts is None else [str(each) for each in range(counts.shape[1])]
    shown = classes if len(classes) <= MOST_CLASSES else []
    # Ten classes of thousands of samples fit into 80 columns.
    columns = (Column(name, justify="right", overflow="fold") for name in ("samples", *shown))
    table = Table(Column("client", overflow="fold"), *columns, box=box.SIMPLE_HEAD)
    table.collapse_padding, table.pad_edge = True, False
    sizes = data.num_samples.tolist()
    for row, (name, size) in enumerate(zip(data.names, sizes, strict=True)):
        if row == MOST_CLIENTS:
            break
        cells = [str(int(n)) for n in counts[row].tolist()] if shown and counts is not None else []
        table.add_row(Text(str(name)), str(size), *(cell if cell != "0" else "." for cell in cells))
    Console().print(table)
    if len(sizes) > MOST_CLIENTS:
        print(f"... and {len(sizes) - MOST_CLIENTS} more clients")
    mean = sum(sizes) / max(len(sizes), 1)
    print(
        f"{len(sizes)} clients, {sum(sizes)} samples; a client has {min(sizes)} to {max(sizes)}, "
        f"{mean:.1f} in the mean"
    )
    if counts is not None:
        held = (counts > 0).sum(1).tolist()
        print(f"classes on a client: {min(held)} to {max(held)} of {len(classes)}")


def draw_partition(module: FederatedDataModule, split: str, path: Path) -> None:
    """Write a picture of a split."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = module.draw(split, figure.add_subplot())  # type: ignore[arg-type]
    axes.set_title(f"who holds what ({split})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")
