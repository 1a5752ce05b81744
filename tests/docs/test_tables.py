"""The registry and the tables of methods are what their classes say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.tables import (
    ROOT,
    described,
    find_methods,
    outdated_pages,
    outdated_registry,
    registry,
    write_page,
)
from lightning_pfl import methods
from lightning_pfl.contract.about import About

HOMES = find_methods()
WORDS = {
    "family": "a personal model",
    "personal": "everything",
    "assumes": "a test",
    "down": "$4d$",
    "up": "$4d$",
    "keeps": "model",
    "gradients": "1",
    "personal_model": "the client's own model",
    "global_model": None,
    "paper": "Somebody et al. 2026",
}


@pytest.mark.parametrize("outdated", [outdated_registry, outdated_pages])
def test_the_tables_are_what_the_classes_say(outdated: type[object]) -> None:
    paths = [str(path.relative_to(ROOT)) for path in outdated()]  # type: ignore[attr-defined]
    assert paths == [], f"{paths} are out of date: run `make tables`"


def test_the_registry_has_every_method() -> None:
    assert list(HOMES) == list(methods.__all__)
    assert {getattr(methods, name).__module__ for name in HOMES} == {
        f"lightning_pfl.methods.{module}" for module in HOMES.values()
    }


def test_methods_are_found_by_their_base(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "class Helper: ...\nclass NewMethod(Mixin, Method): ...\nclass Other(NewMethod): ...\n"
    )
    (tmp_path / "base.py").write_text("class Method(FederatedCallback): ...\n")
    assert find_methods(tmp_path) == {"NewMethod": "new"}
    assert registry({"NewMethod": "new"}).splitlines()[2:] == [
        "from lightning_pfl.methods.new import NewMethod",
        "",
        "__all__ = [",
        '    "NewMethod",',
        "]",
    ]


def test_a_method_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(methods.FedPer, "about")
    with pytest.raises(ValueError, match=r"Expected `FedPer.about` to be an About.*fedper\.py"):
        described(HOMES)


@pytest.mark.parametrize("missing", WORDS)
def test_a_text_that_is_missing_is_named(missing: str) -> None:
    About(**WORDS)  # type: ignore[arg-type]
    words = {name: text for name, text in WORDS.items() if name != missing}
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
        About(**words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"), [("keeps", ""), ("assumes", " "), ("up", "a | b"), ("paper", "a\nb")]
)
def test_a_text_that_is_no_cell_of_a_table_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"Expected `{name}` to be one line .*{name}="):
        About(**{**WORDS, name: text})  # type: ignore[arg-type]


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected `family` to be 'nothing shared'"):
        About(**{**WORDS, "family": "others"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HOMES)
def test_the_paper_is_one_of_the_references(name: str) -> None:
    """Its first author stands in ``References:``, and its year where the reference has one."""
    method = getattr(methods, name)
    _, _, references = method.__doc__.partition("References:")
    if method.about.paper is None:
        assert not references
        return
    for paper in method.about.paper.split("; "):
        author, year = re.findall(r"^(\w[\w ]*?)(?: et al\.| and [\w]+)? (\d{4})", paper)[0]
        assert author in references
        assert year in references or f"arXiv:{year[2:]}" in references


@pytest.mark.parametrize("page", ["no marks", "<!-- methods: begin -->\n", "twice"])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    mark = "<!-- methods: begin -->\nold\n<!-- methods: end -->\n"
    assert write_page(mark, "new\n") == mark.replace("old", "new")
    with pytest.raises(ValueError, match="Expected the page to have one pair of the marks"):
        write_page(page.replace("twice", mark * 2), "new\n")


@pytest.mark.slow
def test_a_new_method_is_a_file(tmp_path: Path) -> None:
    """One command enters it everywhere, also where the registry names a file that is gone."""
    for name in ("lightning_pfl", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    folder = tmp_path / "lightning_pfl" / "methods"
    source = (folder / "fedper.py").read_text()
    (folder / "fedper.py").unlink()
    (folder / "newest.py").write_text(source.replace("FedPer", "Newest"))
    run = [sys.executable, "-m", "docs.tables"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        run, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    pages = ["lightning_pfl/methods/__init__.py", "README.md", "docs/choosing.md"]
    assert done.stdout.splitlines() == [f"written: {n}" for n in [*pages, "docs/evaluation.md"]]
    for name in (*pages, "docs/evaluation.md"):
        rows = [line for line in (tmp_path / name).read_text().splitlines() if "Newest" in line]
        assert rows
        table = (tmp_path / name).read_text().partition("methods: begin")[2]
        assert "FedPer`" not in table.partition("methods: end")[0].replace("`FedPer(", "")
