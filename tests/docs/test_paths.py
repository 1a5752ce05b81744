"""Paths in the pages and cross-references in docstrings name something that exists."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_pfl"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# Flower loads its app by itself, from another folder.
APP = set((PACKAGE / "deploy" / "app").glob("*.py"))
SOURCES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__main__.py"} - APP)
FOLDERS = {path.name for base in (ROOT, PACKAGE) for path in base.iterdir() if path.is_dir()}
FOLDERS -= {"logs"}  # what runs write
#: A name that the house rules forbid, and files of the reader's own.
NO_FILES = {"utils.py", "my_package.py", "test_my_package.py", "fedrep_digits.yaml"}
NO_FILES |= {"recipe.yaml", "resume.yaml", "server.yaml", "client.yaml", "config.yaml", "table.md"}
ROLES = "class|func|meth|mod|data|attr|exc"


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def paths(page: str) -> set[str]:
    """Files and folders that a page names, without patterns such as ``methods/<name>.py``."""
    found = set(re.findall(r"(?<![\w/.<>*:-])[\w./-]+\.(?:py|md|yaml|toml)\b", page))
    quoted = re.findall(r"`([\w.-]+/[\w./-]*)`", page)
    return found | {path for path in quoted if path.split("/")[0] in FOLDERS}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("see `trainer/fit_loop.py`, which", {"trainer/fit_loop.py"}),
        ("[data](docs/data.md)", {"docs/data.md"}),
        ("--config configs/trainer/resume.yaml", {"configs/trainer/resume.yaml"}),
        ("a file of `tests/methods/`", {"tests/methods/"}),
        ("fit(`module.py`)", {"module.py"}),
        ("`tests/methods/test_<name>.py` and `recipes/*.yaml`", set()),
        ("logged as `global/val_acc`, in `https://a.org/b.md`", set()),
    ],
)
def test_paths_are_recognised(page: str, expected: set[str]) -> None:
    assert paths(page) == expected


def text_of(page: Path) -> str:
    """A page, or the text between a notebook's code.

    The first column of the tables in docs/coming_from.md has other projects' names.
    """
    if page.name == "coming_from.md":
        return re.sub(r"^\| [^|]* \|", "|", page.read_text(), flags=re.MULTILINE)
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=relative)
def test_the_paths_of_a_page_exist(page: Path) -> None:
    """From the repository's root, from the package, or from the page's folder, as links are."""
    missing = {
        path
        for path in paths(text_of(page)) - NO_FILES
        if not any((base / path).exists() for base in (ROOT, PACKAGE, page.parent))
    }
    assert missing == set()


def find(name: str) -> Any:
    """The object that a dotted name leads to; raises where there is none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            declared = getattr(found, "__annotations__", {})
            found = getattr(found, part, declared.get(part))
            if found is None:
                break
        else:
            return found
    raise LookupError(f"there is no {name}")


def is_defined(name: str, module: ModuleType) -> bool:
    """Whether ``name`` is something of the module, or of a class that it defines or imports."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    for scope in (module.__name__, *(f"{cls.__module__}.{cls.__qualname__}" for cls in classes)):
        try:
            find(f"{scope}.{name}")
        except LookupError:
            continue
        return True
    return False


def broken(path: Path) -> list[str]:
    """Cross-references of a file that lead nowhere."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    source = path.read_text()
    found = []
    for reference in re.findall(rf":(?:{ROLES}):`~?([^`]+)`", source):
        target = "".join(reference.split())
        if target.split(".")[0] in ("lightning_pfl", "torch", "lightning"):
            try:
                find(target)
            except LookupError:
                found.append(target)
        elif not is_defined(target, module) and f"self.{target} = " not in source:
            found.append(target)
    return found


def test_cross_references_of_docstrings_resolve() -> None:
    assert {relative(path): names for path in SOURCES if (names := broken(path))} == {}
