"""Write every list of the methods from their classes: ``make tables``.

A method is a file of ``lightning_pfl/methods``; its ``about`` has the words of the tables. Nothing
else that names all methods is written by hand: the registry ``lightning_pfl/methods/__init__.py``,
and the tables between ``<!-- methods: begin -->`` and ``<!-- methods: end -->`` in :data:`PAGES`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from lightning_pfl.contract.about import About

ROOT = Path(__file__).resolve().parents[1]
METHODS = ROOT / "lightning_pfl" / "methods"
REGISTRY = METHODS / "__init__.py"
BETWEEN = re.compile(r"(<!-- methods: begin[^\n]*-->\n).*?(<!-- methods: end -->)", re.DOTALL)
HEAD = '"""The federated methods; ``make tables`` writes this registry from their files."""\n'
NOTHING = "–"  # noqa: RUF001


def find_methods(folder: Path = METHODS) -> dict[str, str]:
    """Find the classes that derive from ``Method`` in their own words: from class to module.

    The files are read and not imported, so that a registry which is out of date is no obstacle.
    """
    found = {}
    for path in sorted(folder.glob("*.py")):
        classes = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
        ]
        for one in classes:
            if any(isinstance(base, ast.Name) and base.id == "Method" for base in one.bases):
                found[one.name] = path.stem
    return dict(sorted(found.items(), key=lambda item: item[0].casefold()))


def registry(homes: dict[str, str]) -> str:
    """Write the registry: an import for each method and ``__all__``."""
    package = "lightning_pfl.methods"
    imports = [
        f"from {package}.{module} import {name}"
        for name, module in sorted(homes.items(), key=lambda item: item[1])
    ]
    names = [f'    "{name}",' for name in homes]
    return "\n".join([HEAD, *imports, "", "__all__ = [", *names, "]", ""])


def described(homes: dict[str, str]) -> list[tuple[str, About]]:
    """List the methods with what they say about themselves, by family and year of the paper.

    Raises:
        ValueError: If a method has no ``about``.
    """
    found = []
    for name, module in homes.items():
        method = getattr(import_module(f"lightning_pfl.methods.{module}"), name)
        about = vars(method).get("about")
        if not isinstance(about, About):
            raise ValueError(
                f"Expected `{name}.about` to be an About, but got about={about!r}. Write "
                f"`about = About(...)` in lightning_pfl/methods/{module}.py; "
                "lightning_pfl/contract/about.py says what each argument is."
            )
        found.append((name, about))
    return sorted(found, key=lambda item: (*item[1].place, item[0]))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def summary(methods: Sequence[tuple[str, About]]) -> str:
    """Write the README's table."""
    head = ["method", "what is personal", "paper"]
    return table(
        head, [[f"`{name}`", about.personal, about.paper or NOTHING] for name, about in methods]
    )


def costs(methods: Sequence[tuple[str, About]]) -> str:
    """Write what each method assumes, keeps and sends."""
    head = ["method", "assumes", "down", "up", "a client keeps", "gradients per minibatch"]
    return table(
        head,
        [
            [f"`{name}`", about.assumes, about.down, about.up, about.keeps, about.gradients]
            for name, about in methods
        ],
    )


def evaluated_models(methods: Sequence[tuple[str, About]]) -> str:
    """Write which models are evaluated, one row for methods in which they are the same."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, about in methods:
        models = about.personal_model, about.global_model or NOTHING
        rows.setdefault(models, []).append(f"`{name}`")
    head = ["method", "personal model", "global model"]
    return table(head, [[", ".join(names), *same] for same, names in rows.items()])


PAGES: dict[str, Callable[[Sequence[tuple[str, About]]], str]] = {
    "README.md": summary,
    "docs/choosing.md": costs,
    "docs/evaluation.md": evaluated_models,
}
"""The pages with a table, and what writes it."""


def write_page(text: str, body: str) -> str:
    """Put a table between the marks of a page.

    Raises:
        ValueError: If the marks aren't there exactly once.
    """
    changed, count = BETWEEN.subn(lambda marks: marks[1] + body + marks[2], text)
    if count != 1:
        raise ValueError(
            f"Expected the page to have one pair of the marks `methods: begin` and "
            f"`methods: end`, but got {count}. Put them around the table."
        )
    return changed


def outdated_registry() -> dict[Path, str]:
    """Find the registry's new text, where it differs from what it should be."""
    text = registry(find_methods())
    return {} if REGISTRY.read_text() == text else {REGISTRY: text}


def outdated_pages() -> dict[Path, str]:
    """Find the pages whose table differs from what it should be, and their new texts."""
    methods = described(find_methods())
    old = {name: (ROOT / name).read_text() for name in PAGES}
    new = {name: write_page(old[name], write(methods)) for name, write in PAGES.items()}
    return {ROOT / name: text for name, text in new.items() if text != old[name]}


def main() -> None:
    """Rewrite what is out of date, and name it."""
    for outdated in (outdated_registry, outdated_pages):  # a method is imported by the registry
        for path, text in outdated().items():
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
