"""The table of results: for the terminal and for README.md."""

import statistics
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from lightning_pfl.results.groups import FURTHER

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
COLUMNS = (
    "recipe",
    "method",
    "rounds",
    "seeds",
    "last 10 rounds",
    "worst decile",
    "test",
    "test worst decile",
    "minutes",
    "commit",
)
#: What fits a terminal.
SHOWN = ("method", "last 10 rounds", "worst decile", "test", "test worst decile", "minutes")


def spread(values: list[float]) -> str:
    """Format mean and sample standard deviation in percent, without deviation for one value."""
    percent = [100 * value for value in values]
    if not percent:
        return "-"
    if len(percent) == 1:
        return f"{percent[0]:.2f}"
    return f"{statistics.mean(percent):.2f} ± {statistics.stdev(percent):.2f}"


def losses(values: list[float]) -> str:
    """Format mean and sample standard deviation of losses."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"loss {statistics.mean(values):.3g}{deviation}"


def compared(recipe: dict[str, Any]) -> str:
    """Return the prefix of the compared models' values: of fine-tuned ones, if there are some."""
    callbacks = [each["class_path"] for each in recipe["trainer"].get("callbacks") or []]
    kinds = {"HeadFineTuning": "ft/", "NearestNeighbours": "knn/"}
    found = (kinds[name] for name in kinds if any(each.endswith(name) for each in callbacks))
    return next(found, "")


def row(recipe: Path, outcomes: list[dict[str, Any]]) -> list[str]:
    """Make one line of the table, with dashes for missing values."""
    settings = yaml.safe_load(recipe.read_text())
    prefix = compared(settings)

    def cell(part: str, split: str, statistic: str) -> str:
        found = [outcome[part].get(f"{prefix}{split}_acc") for outcome in outcomes]
        if any(values is not None for values in found):
            return spread([values[statistic] for values in found if values is not None])
        found = [outcome[part].get(f"{prefix}{split}_loss") for outcome in outcomes]
        return losses([values[statistic] for values in found if values is not None])

    minutes = [outcome["seconds"] / 60 for outcome in outcomes]
    return [
        recipe.name,
        settings["method"]["class_path"] + (f" + {FURTHER[prefix]}" if prefix else ""),
        str(settings["trainer"]["max_epochs"]),
        str(len(outcomes)),
        cell("last10", "val", "mean"),
        cell("last10", "val", "worst_decile"),
        cell("test", "test", "mean"),
        cell("test", "test", "worst_decile"),
        f"{statistics.mean(minutes):.1f}" if minutes else "-",
        ", ".join(sorted({outcome["commit"] for outcome in outcomes})) or "-",
    ]


def table(recipes: list[Path], stored: list[dict[str, Any]]) -> list[list[str]]:
    """Make the rows of all recipes, in the given order."""
    return [
        row(recipe, [outcome for outcome in stored if outcome["recipe"] == recipe.name])
        for recipe in recipes
    ]


def print_comparison(recipes: list[Path], stored: list[dict[str, Any]]) -> None:
    """Print the rows on the terminal."""
    shown = Table(*SHOWN, title="Accuracy of the personal models, mean over clients, in percent")
    for cells in table(recipes, stored):
        values = dict(zip(COLUMNS, cells, strict=True))
        shown.add_row(*(values[column] for column in SHOWN))
    Console().print(shown)


def write_readme(folder: Path, stored: list[dict[str, Any]]) -> None:
    """Replace the table between the markers in ``README.md``."""
    readme = folder / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for cells in table(sorted(folder.rglob("*.yaml")), stored):
        lines.append(f"| [{cells[0]}]({cells[0]}) | " + " | ".join(cells[1:]) + " |")
    machines = sorted({f"{outcome['machine']}, torch {outcome['torch']}" for outcome in stored})
    note = f"\nMachine: {'; '.join(machines)}.\n" if machines else ""
    readme.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{note}{END}{after}")
