"""The house rules that a machine can check."""

import ast
import re
from pathlib import Path

import pytest

from lightning_pfl import methods
from lightning_pfl.methods.base import Method

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_pfl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PRIVATE_IMPORTS_ALLOWED = {PACKAGE / "_lightning.py", PACKAGE / "engine" / "operators.py"}
FOREIGN = ("lightning", "pytorch_lightning", "torch", "torchmetrics")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def private_imports(source: str) -> list[str]:
    """Dotted names with a private part that ``source`` imports from a foreign package."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if parts[0] in FOREIGN and private:
                found.append(name)
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch._C import x", ["torch._C.x"]),
        ("from lightning.pytorch.loops import _FitLoop", ["lightning.pytorch.loops._FitLoop"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch.nn import Linear", []),
        ("from lightning_pfl._lightning import FitLoop", []),
        ("from . import _private", []),
    ],
)
def test_private_imports_are_recognised(source: str, expected: list[str]) -> None:
    assert private_imports(source) == expected


def test_private_names_are_imported_in_two_files_only() -> None:
    found = {
        relative(path): names
        for path in SOURCES
        if path not in PRIVATE_IMPORTS_ALLOWED and (names := private_imports(path.read_text()))
    }
    assert found == {}


def test_few_modules_stand_at_the_top_level() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 4


def test_no_module_of_the_package_is_imported_inside_a_function() -> None:
    """Nothing closes a circle, so nothing has to wait for the first call."""
    found = {
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_pfl")
        if relative(path) != "lightning_pfl/__init__.py"  # names load when first used: start-up
    }
    assert found == set()


TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
# Folders whose tests are about something outside of the package.
OTHER_FOLDERS = {"recipes", "docs", "benchmarks"}


def subject(path: Path) -> bool:
    """Whether a file of tests is named after a module of its folder; `test_all_*` is of all."""
    tested = PACKAGE / path.parent.relative_to(ROOT / "tests")
    modules = {p.stem for p in tested.glob("*.py")} | {
        p.parent.name for p in tested.glob("*/__init__.py")
    }
    name = path.stem.removeprefix("test_")
    return any(name == module or name.startswith(f"{module}_") for module in modules | {"all"})


def test_tests_stand_where_the_package_has_what_they_test() -> None:
    """`tests/a/test_b_more.py` tests `lightning_pfl/a/b.py`."""
    paths = [path.relative_to(ROOT / "tests") for path in TESTS]
    inside = {path for path in paths if path.parts[0] not in OTHER_FOLDERS and len(path.parts) > 1}
    assert len(inside) > 100
    assert {str(path) for path in inside if not subject(ROOT / "tests" / path)} == set()


METHODS = sorted((PACKAGE / "methods").rglob("*.py"))


def lightnings_names(source: str) -> list[str]:
    """What ``source`` imports from Lightning, and its names for a Trainer."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [n for n in names if n.split(".")[0] in ("lightning", "pytorch_lightning")]
        named = {"arg", "id", "attr"} & set(node._fields)
        found += [node.__class__.__name__ for f in named if getattr(node, f) == "trainer"]
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import lightning as L", ["lightning"]),
        ("from lightning.pytorch import Trainer", ["lightning.pytorch"]),
        ("def f(trainer): ...", ["arg"]),
        ("self.trainer.current_epoch", ["Attribute"]),
        ("from lightning_pfl.core.tree import Tree", []),
    ],
)
def test_lightnings_names_are_recognised(source: str, expected: list[str]) -> None:
    assert lightnings_names(source) == expected


def test_methods_never_touch_the_trainer() -> None:
    found = {relative(p): names for p in METHODS if (names := lightnings_names(p.read_text()))}
    assert found == {}


def test_no_module_is_named_after_nothing() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [relative(path) for path in SOURCES if path.stem in names] == []


# Words of no technical meaning for which the field, Lightning or plain English has a better one.
BANNED_WORDS = (
    "beside|nobody|somebody|everybody|told|tells|tell|says|said|hears|heard|remembers?|remembered"
    "|memories|so many|so far as|whoever"
)
CUT = re.compile(r"\b(e\.g|i\.e|cf|vs|resp)\.$")


def sentence_problem(docstring: str) -> str | None:
    """What is wrong with a docstring's first line; None if it is a sentence in plain words."""
    first = docstring.strip().splitlines()[0]
    if not first.endswith("."):
        return "doesn't end with a period"
    if CUT.search(first):
        return "is cut in two"
    if re.match(r"(What|Who|Where|How)\b", first):
        return "begins with a question word"
    found = re.search(rf"\b({BANNED_WORDS})\b", first, re.IGNORECASE)
    return f"has the word {found[0]!r}" if found else None


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("Derive a key, e.g. `derive(seed, round)`.", None),
        ("Derive a key, e.g.\n\n``derive(seed)``.", "is cut in two"),
        ("Derive a key\n\nfor a purpose.", "doesn't end with a period"),
        ("Evaluate beside the others.", "has the word 'beside'"),
        ("Whether nobody trains.", "has the word 'nobody'"),
        ("Draw so many samples.", "has the word 'so many'"),
        ("What the server sends.", "begins with a question word"),
        ("Whether it is due.", None),
        ("Retell the essay.", None),
    ],
)
def test_sentence_problems_are_recognised(docstring: str, problem: str | None) -> None:
    assert sentence_problem(docstring) == problem


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_first_lines_of_docstrings_are_sentences_in_plain_words(path: Path) -> None:
    found = {
        f"{relative(path)}:{getattr(node, 'lineno', 1)}": problem
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (docstring := ast.get_docstring(node)) and (problem := sentence_problem(docstring))
    }
    assert found == {}


def test_every_public_name_of_methods_exists_and_every_method_is_public() -> None:
    assert [name for name in methods.__all__ if not hasattr(methods, name)] == []
    defined = {
        cls.__name__
        for cls in Method.__subclasses__()
        if cls.__module__.startswith(methods.__name__)
    }
    assert defined == set(methods.__all__)


@pytest.mark.parametrize("name", methods.__all__)
def test_every_method_has_a_test_a_recipe_and_a_changelog_line(name: str) -> None:
    module = getattr(methods, name).__module__.rsplit(".", 1)[1]
    tests = ROOT / "tests" / "methods" / f"test_{module}.py"
    assert tests.is_file(), f"{name} needs {relative(tests)}"
    assert "@closed_form\n" in tests.read_text(), f"`make quick` needs a closed form of {name}"
    recipes = [
        p for p in (ROOT / "recipes").rglob("*.yaml") if f"class_path: {name}\n" in p.read_text()
    ]
    assert recipes, f"{name} needs a recipe that names `class_path: {name}`"
    assert f"`{name}`" in (ROOT / "CHANGELOG.md").read_text(), f"{name} needs a changelog line"
