"""The command line's parser, with suggestions for misspelt names and help without LaTeX."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import yaml
from jsonargparse import (  # type: ignore[attr-defined]
    ActionConfigFile,
    Namespace,
    get_loader,
    set_loader,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

import lightning_pfl
from lightning_pfl import callbacks, data, methods, models
from lightning_pfl.cli.formulas import plain

PACKAGES = (methods, models, data, callbacks, lightning_pfl)
#: Classes that a recipe can name without a module path.
CLASSES = tuple(dict.fromkeys(name for package in PACKAGES for name in package.__all__))
# Wordings of jsonargparse, 4.39 to 4.53; with another one only the suggestion is missing.
CLASS = re.compile(
    r"Expected a dot import path string: ([\w.]+)"
    r"|given class_path '([\w.]+)':\s+module 'lightning_pfl[\w.]*' has no attribute '"
)
#: Of another package, or of the user's own.
ELSEWHERE = re.compile(
    r"given class_path '([\w.]+)':\s+"
    r"(No module named '[\w.]+'|module '[\w.]+' has no attribute '\w+')"
)
OTHER_KIND = re.compile(r"Import path (?:([\w.]+) )?does not correspond to a subclass of (\w+)")
KIND = re.compile(r"Subtypes: \[<class '(?:\w+\.)*(\w+)'>")
NO_CLASS = re.compile(r"Not a valid subclass of \w+\n")
GIVEN = re.compile(r"Given value: ([^\n]*)")
KEY = re.compile(r'Parser key "([\w.]+)"|--([\w.]+)\.help:')
ARGUMENT = re.compile(
    r"given class_path '([\w.]+)':\s+(?:Validation failed: )?"
    r"(?:Option|Key) '([\w.]+)' is not (?:accepted|expected)"
)
MISSING = re.compile(
    r"given class_path '([\w.]+)':\s+(?:Validation failed: )?"
    r"the following arguments are required: ([\w., ]+)"
)
OPTION = re.compile(
    r"[Uu]nrecognized arguments: --([\w.]+)|"
    r"does not accept (?:option|nested key) '([\w.]+)'"
)
TYPES = re.compile(
    r"Subtypes: \[([^\n]*)\]\s+Errors:\n(?:\s+- Expected a <class[^\n]*\n)+"
    r"\s+Given value type: [^\n]*\n\s+Given value: ([^\n]*)"
    r"|Expected a (<class '\w+'>)\. Got value: ([^\n]*)"
)
HELP = re.compile(r'Parser key "(\w+)"(?s:.*)unrecognized arguments: --([\w.]+)\.help=([\w.]+)')
OWN_WORDS = re.compile(r"Expected .+ but got .+")
#: Lightning's, about a strategy or a profiler by name.
LIGHTNINGS_WORDS = re.compile(r"You selected an invalid .+")


MODE = "yaml with each key once"
"""The parser mode of configuration files; jsonargparse's own takes the last of equal keys."""
_load_yaml = get_loader("yaml")


class Parser(LightningArgumentParser):
    """Lightning's parser with short errors and readable help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Lightning 2.6 uses names that jsonargparse 4.49 has renamed; users can't change it.
        os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        super().__init__(*args, **{"parser_mode": MODE, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with status 2 and the message, with the nearest name for a misspelt one."""
        if self.exit_on_error:
            keys = (getattr(ex, "subcommand_parser", None) or self).get_defaults().keys()
            message = explain(message, keys)
        super().error(message, ex)
        raise AssertionError  # it has exited

    def print_usage(self, file: Any = None) -> None:
        """Print no usage before an error, which would be far above it."""
        if file is not sys.stderr:
            super().print_usage(file)

    def dump(self, cfg: Namespace, **kwargs: Any) -> str:
        """Write a configuration without the strategy's ``method`` where the recipe's own holds."""
        cfg = cfg.clone()
        for key in ("trainer.strategy", f"{cfg.get('subcommand')}.trainer.strategy"):
            if cfg.get(f"{key}.init_args.method", 0) is None:
                del cfg[f"{key}.init_args.method"]
        text: str = super().dump(cfg, **kwargs)
        return text

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Format the help, with formulas as plain text; that of a method names their source."""
        text = plain(super().format_help(*args, **kwargs))
        of_method = re.search(r"method\.help=(?:lightning_pfl\.methods\.)?([\w.]+)", text)
        if of_method is not None:
            text += f"\nIts formulas and their symbols: lightning-pfl methods show {of_method[1]}\n"
        return text


def load_with_each_key_once(text: str) -> Any:
    """Load YAML as jsonargparse does.

    Raises:
        yaml.YAMLError: If a mapping has a key twice: one of the two values would be lost.
    """
    if "\n" in text:  # a file, and no value of the command line
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader))
    return _load_yaml(text)


def _check_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _check_keys(entry)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            _check_keys(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (first := lines.setdefault(key.value, line)) != line:
                raise yaml.YAMLError(
                    f"Expected each key once, but got {key.value!r} in lines {first} and {line}. "
                    "Remove one of them."
                )


set_loader(MODE, load_with_each_key_once, (yaml.YAMLError,))


def read_sections(
    configs: Sequence[Path], kinds: Mapping[str, type], options: Sequence[str] = ()
) -> tuple[Parser, Namespace]:
    """Read some sections of recipes, a later recipe over an earlier one; others are ignored.

    Args:
        configs: The recipes.
        kinds: The base class of each section.
        options: Options of the command line, such as ``--data.num_clients 10``.

    Returns:
        The parser, which can make the objects, and the sections.
    """
    parser = Parser()
    parser.add_argument("--config", action=ActionConfigFile)
    for name, kind in kinds.items():
        parser.add_lightning_class_args(kind, name, subclass_mode=True, required=False)
    with tempfile.TemporaryDirectory() as folder:
        words = []
        for number, path in enumerate(configs):
            recipe = load_with_each_key_once(path.read_text()) or {}
            file = Path(folder, f"{number}.yaml")
            file.write_text(yaml.safe_dump({k: recipe[k] for k in kinds if recipe.get(k)}))
            words += ["--config", str(file)]
        return parser, parser.parse_args([*words, *options])


def explain(message: str, keys: Iterable[str]) -> str:
    r"""Add the nearest name to an error of jsonargparse about a misspelt one.

    Args:
        message: The error.
        keys: Options that there are.

    Example:
        >>> explain("unrecognized arguments: --trainer.max_epoch 3", ["trainer.max_epochs"])
        "unrecognized arguments: --trainer.max_epoch 3\nDid you mean 'trainer.max_epochs'?"
    """
    near: str | None = None
    if found := HELP.search(message):
        key, argument, name = found.groups()
        return (
            f"Expected a class before the help of its arguments, but got --{key}.{argument}.help "
            f"alone. Name it first: --{key} CLASS --{key}.{argument}.help {name}"
        )
    if found := CLASS.search(message):
        given = found[1] or found[2]
        name, key = given.rpartition(".")[2], _key(message, found)
        if key == "method":
            near = nearest(name, methods.__all__)
            return (
                f"Expected `method` to be one of {', '.join(methods.__all__)}, or the import path "
                f"of your own method, but got method={given!r}. "
                + (f"Did you mean {near!r}?" if near else "Choose one of them.")
            )
        near = nearest(name, CLASSES)
        if near == given and (kinds := KIND.findall(message[: found.start()])):
            return _of_another_kind(key, given, kinds[-1])
        # Without one it may be a class of one's own, whose module has an error to show.
        message = f"Expected `{key}` to be a class, but got {given!r}." if near else message
    elif found := ELSEWHERE.search(message):
        module, _, name = found[1].rpartition(".")
        near = nearest(name, dir(locate(module))) if "attribute" in found[2] else None
        message = (
            f"Expected `{_key(message, found)}` to be a class, but got {found[1]!r}: {found[2]}."
        )
        if not near:
            return f"{message} Install the package, or start where its file is."
        near = f"{module}.{near}"
    elif found := OTHER_KIND.search(message):
        return _of_another_kind(_key(message, found), found[1] or _given(message), found[2])
    elif found := ARGUMENT.search(message):
        called, known = found[1].rpartition(".")[2], arguments(found[1])
        near = nearest(found[2], known)
        message = f"Expected an argument of {called}, but got {found[2]!r}."
        if not near:
            return f"{message} {_choice(known) or 'It takes none.'}"
    elif found := MISSING.search(message):
        called, key = found[1].rpartition(".")[2], _key(message, found)
        options = " ".join(f"--{key}.{name} VALUE" for name in found[2].split(", "))
        return (
            f"Expected {called} to be given {found[2]}, which has no default, but got none. Add "
            f"{options}; what it takes: --{key}.help {called}."
        )
    elif found := TYPES.search(message):
        *kinds, last = _kinds(found[1] or found[3])
        kind = f"{', '.join(kinds)} or {last}" if kinds else last
        return f"Expected `{_key(message, found)}` to be {kind}, but got {found[2] or found[4]!r}."
    elif found := OPTION.search(message):
        key, keys = found[1] or found[2], list(keys)
        near = nearest(key, keys) or nearest(key.split(".")[0], {k.split(".")[0] for k in keys})
    elif found := NO_CLASS.search(message):
        return (
            f"Expected `{_key(message, found)}` to be a class, but got {_given(message)}. Write "
            "its name, or `class_path: NAME` and `init_args`."
        )
    return f"{message}\nDid you mean {near!r}?" if near else message


def _of_another_kind(key: str, given: str, kind: str) -> str:
    """Say that a class isn't of the kind that is expected, and what is, of this package."""
    ours = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
    known = [
        name
        for name, one in ours.items()
        if kind in (base.__name__ for base in getattr(one, "__mro__", ())[1:])
        and not inspect.isabstract(one)
    ]
    text = f"Expected `{key}` to be a subclass of {kind}, but got {given!r}, which is none."
    return " ".join(filter(None, (text, _choice(known))))


def _given(message: str) -> str:
    """Return the innermost value that an error is about."""
    return next(iter(GIVEN.findall(message)), "")


def _choice(names: Sequence[str]) -> str:
    return f"Choose one of {', '.join(names)}." if names else ""


def _key(message: str, found: re.Match[str]) -> str:
    """Return the whole key of a value that an error is about, such as ``method.head_epochs``."""
    return ".".join(a or b for a, b in KEY.findall(message[: found.start()]))


def _kinds(types: str) -> list[str]:
    """Write types as people do: those of a recipe's YAML."""
    names = re.sub(r"<class '([\w.]+)'>", r"\1", types).replace("NoneType", "null")
    short = re.sub(r"\b(?:[a-z_]+\.)+(?=\w)", "", names)
    return re.split(r", (?![^\[]*\])", short)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Find the most similar name, ignoring case; None if none is similar.

    Example:
        >>> nearest("scafold", ["FedAvg", "SCAFFOLD"])
        'SCAFFOLD'
    """
    known = {each.casefold(): each for each in names}
    found = get_close_matches(name.casefold(), known, n=1)
    return known[found[0]] if found else None


def arguments(class_path: str) -> list[str]:
    """List the arguments of a class, and of classes that it passes arguments on to."""
    bases = getattr(locate(class_path), "__mro__", ())
    found = (one for base in bases for one in inspect.signature(base.__init__).parameters.values())
    # Of several in one, such as **kwargs, the names are those of a base.
    names = [one.name for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [name for name in dict.fromkeys(names) if name != "self"]


def in_a_line(error: Exception) -> str | None:
    r"""Extract the error text about a setting from jsonargparse's text.

    Args:
        error: Raised while the objects of a configuration were made.

    Returns:
        The text; None for errors that aren't about a setting, such as a bug in a module.

    Example:
        >>> in_a_line(ValueError("Errors:\n  - Expected `a` to be 1, but got a=2. Use 1.\n - b"))
        'Expected `a` to be 1, but got a=2. Use 1.'
    """
    if found := OWN_WORDS.search(str(error)) or LIGHTNINGS_WORDS.match(str(error)):
        return found[0]
    return str(error) if isinstance(error, MisconfigurationException) else None
