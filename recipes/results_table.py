"""The table of results: for the terminal and for README.md."""

import statistics
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

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


def headline(values: dict[str, dict[str, float]], name: str) -> dict[str, float]:
    """The statistics of the personal models: fine-tuned ones where there are any."""
    nothing: dict[str, float] = {}
    return values.get(f"ft/{name}", values.get(name, nothing))


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation in percent; one value alone has no deviation."""
    percent = [100 * value for value in values]
    if len(percent) < 2:
        return f"{percent[0]:.2f}"
    return f"{statistics.mean(percent):.2f} ± {statistics.stdev(percent):.2f}"


def method_name(recipe: dict[str, Any]) -> str:
    """The method of a recipe; ``+ FT`` where the heads are fine-tuned."""
    callbacks = recipe["trainer"].get("callbacks") or []
    tuned = any(callback["class_path"].endswith("HeadFineTuning") for callback in callbacks)
    return str(recipe["method"]["class_path"]) + (" + FT" if tuned else "")


def row(recipe: Path, outcomes: list[dict[str, Any]]) -> list[str]:
    """One line of the table; dashes where a recipe has no outcome yet."""
    settings = yaml.safe_load(recipe.read_text())
    begin = [recipe.name, method_name(settings), str(settings["trainer"]["max_epochs"])]
    if not outcomes:
        return [*begin, "0", *["-"] * (len(COLUMNS) - len(begin) - 1)]
    last = [headline(outcome["last10"], "val_acc") for outcome in outcomes]
    tested = [headline(outcome["test"], "test_acc") for outcome in outcomes]
    return [
        *begin,
        str(len(outcomes)),
        spread([values["mean"] for values in last]),
        spread([values["worst_decile"] for values in last]),
        spread([values["mean"] for values in tested]),
        spread([values["worst_decile"] for values in tested]),
        f"{statistics.mean(outcome['seconds'] for outcome in outcomes) / 60:.1f}",
        ", ".join(sorted({outcome["commit"] for outcome in outcomes})),
    ]


def table(recipes: list[Path], stored: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of all recipes, in the order given."""
    return [
        row(recipe, [outcome for outcome in stored if outcome["recipe"] == recipe.name])
        for recipe in recipes
    ]


def print_comparison(recipes: list[Path], stored: list[dict[str, Any]]) -> None:
    """Show the rows on the terminal."""
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
