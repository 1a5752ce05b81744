"""The commands ``lightning-pfl methods ...`` and ``lightning-pfl recipes ...``."""

from __future__ import annotations

import inspect
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution
from itertools import takewhile
from pathlib import Path
from pydoc import locate
from typing import Any

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from lightning_pfl import methods
from lightning_pfl.cli.formulas import plain
from lightning_pfl.cli.parser import nearest
from lightning_pfl.contract.about import FAMILIES
from lightning_pfl.methods.base import Method

LEGEND = "d: trainable numbers of the model, d_B those of the backbone, d_H those of the head."
SECTIONS = (
    "Args",
    "Attributes",
    "State",
    "Deviation from the paper",
    "Raises",
    "Example",
    "References",
)
"""The sections of a method's docstring."""
COMMANDS = ("methods", "recipes")
"""The first words of the commands of this file."""
INSTALLED = ("share", "lightning-pfl")
"""Where an installation has ``recipes/`` and ``configs/``, below its prefix; see pyproject.toml."""
TITLES = {
    "family": "family",
    "personal": "what is personal",
    "assumes": "assumes",
    "down": "bytes down a round",
    "up": "bytes up a round",
    "keeps": "a client keeps",
    "gradients": "gradients per minibatch",
    "personal_model": "personal model",
    "global_model": "global model",
    "paper": "paper",
}


def catalogue_parser() -> tuple[ArgumentParser, Any]:
    """Make the parser of ``lightning-pfl methods`` and ``recipes``, and that of its first words."""
    parser = ArgumentParser("lightning-pfl", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    of_methods = commands.add_parser("methods", help="the methods, and what each is")
    actions = of_methods.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="all methods, in a table")
    show = actions.add_parser("show", help="one method: what it assumes, sends and keeps")
    show.add_argument("name", metavar="NAME", help="a method, or the import path of your own")
    of_recipes = commands.add_parser("recipes", help="the experiments, and parts to combine")
    actions = of_recipes.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="all recipes and configs, in a table")
    show = actions.add_parser("show", help="print one recipe")
    show.add_argument("name", metavar="NAME", help="a name of the list, such as fedrep_digits")
    copy = actions.add_parser("copy", help="copy one recipe, to change and run it")
    copy.add_argument("name", metavar="NAME", help="a name of the list, such as fedrep_digits")
    copy.add_argument("to", metavar="TO", nargs="?", default=".", help="a folder, or a new file")
    return parser, commands


def run_catalogue(words: Sequence[str]) -> None:
    """Run ``methods list|show`` or ``recipes list|show|copy``.

    Args:
        words: The command line after ``lightning-pfl``.
    """
    parser, _ = catalogue_parser()
    given = parser.parse_args(words)
    try:
        if given.command == "methods":
            list_methods() if given.action == "list" else show_method(given.name)
        elif given.action == "list":
            list_recipes()
        elif given.action == "show":
            print(find_recipe(given.name).read_text(), end="")
        else:
            copy_recipe(given.name, Path(given.to))
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


def list_methods() -> None:
    """Print a table of the methods, a section for each family."""
    about = {name: getattr(methods, name).about for name in methods.__all__}
    table = Table(Column("method", no_wrap=True), "what is personal", "paper")
    for family in FAMILIES:
        members = [name for name in about if about[name].family == family]
        for name in sorted(members, key=lambda name: (about[name].place, name)):
            words = Text(_in_words(about[name].personal))
            table.add_row(name, words, about[name].paper or "")
        table.add_section()
    Console().print(table)


def show_method(name: str) -> None:
    """Print the description of one method.

    Args:
        name: A registered name, or the import path of a class.

    Raises:
        ValueError: If there is no such method.
    """
    method = getattr(methods, name) if name in methods.__all__ else locate(name)
    if not (isinstance(method, type) and issubclass(method, Method)):
        near = nearest(name, methods.__all__)
        raise ValueError(
            f"Expected NAME to be a method or its import path, but got {name!r}. "
            + (f"Did you mean {near!r}?" if near else "`lightning-pfl methods list` shows them.")
        )
    doc = inspect.getdoc(method) or ""
    first = doc.partition("\n")[0]
    table = Table(show_header=False)
    for field, text in asdict(method.about).items() if method.about else ():
        table.add_row(TITLES[field], Text("none" if text is None else _in_words(text)))
    table.add_section()
    for section in ("State", "Deviation from the paper", "References"):
        if text := _section(doc, section):
            table.add_row(section.lower(), Text(text))
    table.add_section()
    for parameter in inspect.signature(method).parameters.values():
        required = parameter.default is parameter.empty
        table.add_row(parameter.name, Text("required" if required else repr(parameter.default)))
    console = Console()
    console.print(Text(_in_words(f"{method.__name__}: {first}")))
    for paragraph, indent in _description(doc):
        console.print()
        console.print(Padding(Text(paragraph), (0, 0, 0, indent), expand=False))
    console.print()
    console.print(table)
    if method.about:
        console.print(Text(LEGEND))
    print(f"What each argument means: lightning-pfl fit --method.help {name}")


def list_recipes() -> None:
    """Print a table of the recipes and of the configs, which are parts to combine."""
    table = Table(Column("name", no_wrap=True), "method", "what it is")
    for name, path in find_recipes().items():
        text = path.read_text()
        method = (yaml.safe_load(text) or {}).get("method", "")
        called = method.get("class_path", "") if isinstance(method, dict) else str(method)
        table.add_row(name, called, Text(_first_sentence(text)))
    # What reads a pipe has no width, and rich's guess of 80 is narrow.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def copy_recipe(name: str, to: Path) -> None:
    """Copy a recipe, whose comments then name the copy, and print how to run it.

    Args:
        name: A name of :func:`find_recipes`.
        to: A folder, or the new file.

    Raises:
        ValueError: If the file is there already.
    """
    source = find_recipe(name)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise ValueError(
            f"Expected TO to be a new file, but got {target}, which exists. Remove it, or name "
            "another file."
        )
    kind = source.parent.name
    folder = kind if kind == "recipes" else f"configs/{kind}"
    text = source.read_text().replace(f"{folder}/{source.name}", str(target))
    with target.open("x") as file:
        file.write(text)
    option = "--config" if "/" not in name else "--config RECIPE.yaml --config"
    print(f"written: {target}\n  lightning-pfl fit {option} {target}")


def find_recipe(name: str) -> Path:
    """Find a recipe by its name, with or without ``.yaml``.

    Raises:
        ValueError: If there is none.
    """
    recipes = find_recipes()
    short = name.removesuffix(".yaml").removeprefix("recipes/").removeprefix("configs/")
    if short not in recipes:
        near = nearest(short, recipes)
        raise ValueError(
            f"Expected NAME to be a recipe, but got {name!r}. "
            + (f"Did you mean {near!r}?" if near else "`lightning-pfl recipes list` shows them.")
        )
    return recipes[short]


def find_recipes() -> dict[str, Path]:
    """Find the recipes by name, then the configs by ``kind/name``.

    They are those of the checkout that the package is in, else those that were installed with it.

    Raises:
        ValueError: If this installation has none.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        files = [*checkout.glob("recipes/*.yaml"), *checkout.glob("configs/*/*.yaml")]
    else:
        files = _installed_files()
    if not files:
        raise ValueError(
            "Expected recipes in this installation of lightning-pfl, but got none. Install its "
            "wheel, or use a checkout."
        )
    recipes = {file.stem: file for file in files if file.parent.name == "recipes"}
    configs = {f"{file.parent.name}/{file.stem}": file for file in files}
    parts = {
        name: configs[name] for name in sorted(configs) if configs[name] not in recipes.values()
    }
    return {**dict(sorted(recipes.items())), **parts}


def _installed_files() -> list[Path]:
    try:
        files = distribution("lightning-pfl").files or []
    except PackageNotFoundError:
        return []
    own = [file for file in files if file.suffix == ".yaml" and set(INSTALLED) <= set(file.parts)]
    return [Path(str(file.locate())).resolve() for file in own]


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment on top of a file; empty without a comment."""
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    words = " ".join(line.lstrip("#").strip() for line in comment)
    return re.split(r"(?<!et al\.)(?<=\.)\s|(?<=:)\s(?=lightning-pfl)", words)[0].rstrip(":")


def _in_words(text: str) -> str:
    """Write a text of a table for a terminal: formulas and code without their marks."""
    return plain(re.sub(r"\$([^$]*)\$", r":math:`\1`", text)).replace("`", "")


def _description(doc: str) -> Iterator[tuple[str, int]]:
    """Split the text between a docstring's first line and its sections.

    Returns:
        Paragraphs, blocks of formulas and lists, each with the width of its indent.
    """
    body = re.split(rf"^(?:{'|'.join(SECTIONS)}):", doc.partition("\n")[2], flags=re.MULTILINE)[0]
    for paragraph in re.split(r"\n\s*\n", plain(body).strip("\n").rstrip()):
        words = _in_words(paragraph)
        if words.startswith(" "):
            lines = words.split("\n")
            yield "\n".join(line.strip() for line in lines), 4
        elif words:
            yield re.sub(r"\s*\n\s*(?!- )", " ", words), 0


def _section(doc: str, title: str) -> str:
    """Return a section of a docstring in one paragraph, without marks; empty if it isn't there."""
    found = re.search(rf"^{title}:(.*?)(?=\n\n\S|\Z)", doc, re.DOTALL | re.MULTILINE)
    return _in_words(plain(" ".join(found[1].split()))) if found else ""
