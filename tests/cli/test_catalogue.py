"""`lightning-pfl methods` and `lightning-pfl recipes`, in a checkout and from a wheel."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from lightning_pfl import __version__, methods
from lightning_pfl.cli import catalogue
from lightning_pfl.cli.catalogue import find_recipes
from lightning_pfl.cli.command_line import main
from lightning_pfl.methods.base import Method

ROOT = Path(__file__).resolve().parents[2]


class Unregistered(Method):
    """Average the models, with defaults that look like [bold]markup[/bold]."""

    def __init__(self, needed: int, names: str = "[red]") -> None:
        super().__init__()


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(list(words))
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def test_the_list_has_every_method_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "methods", "list").splitlines()
    for name in methods.__all__:
        about = getattr(methods, name).about
        (row,) = [line for line in lines if line.startswith(f"│ {name} ")]
        assert about.personal.replace("`", "") in row
        assert (about.paper or "") in row


@pytest.mark.parametrize("name", methods.__all__)
def test_a_method_is_shown_with_its_settings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "methods", "show", name)
    method = getattr(methods, name)
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in text.splitlines()
        if len(cells := line.split("│")) == 4
    }
    assert text.startswith(f"{name}: ")
    assert not {"$", "`", "\\"} & set(text)
    assert ":math:" not in text
    assert ":class:" not in text
    assert "..math" not in text.replace(" ", "")
    assert rows["global model"] == (method.about.global_model or "none")
    assert rows["state"]
    assert rows["deviation from the paper"]
    assert ("references" in rows) == (method.about.paper is not None)
    for parameter in inspect.signature(method).parameters.values():
        default = repr(parameter.default)
        assert rows[parameter.name] == ("required" if default == repr(inspect._empty) else default)


@pytest.mark.parametrize("name", methods.__all__)
def test_what_a_description_names_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block of formulas is on the screen, before sections that speak of what is above."""
    text = said(capsys, "methods", "show", name)
    doc = inspect.getdoc(getattr(methods, name)) or ""
    description, table = text.split("┌")
    formulas = [line for line in description.splitlines() if line.startswith("    ")]
    assert len(formulas) >= doc.count(".. math::")
    assert formulas or "formula above" not in table
    # The last words before the arguments, of which none is in a formula's block.
    last = doc.partition("\nArgs:")[0].split("\n\n")[-1].strip()
    if not last.startswith(".. math::") and "`" not in last:
        assert " ".join(last.split()) in " ".join(description.split())


def test_the_formula_of_a_deviation_is_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "methods", "show", "SCAFFOLD")
    formula = "    c_k^+ = g_k(x) (option I) or c_k - c + (x - y)/(K eta) (option II)"
    assert -1 < text.find(formula) < text.find("equals the formula above")
    assert "c_k estimates the gradient of client k, c that of all clients" in text


def test_a_list_of_a_description_has_a_line_for_each_item(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [one.rstrip() for one in said(capsys, "methods", "show", "FedASA").splitlines()]
    assert '- "all": every cell, which is FedAvg.' in lines
    assert '- "given": the cells in shared.' in lines


def test_formulas_are_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "methods", "show", "SheafFMTL")
    assert "8 sum_j d_ij, fixed maps 4 sum_j d_ij" in text


def test_a_method_of_ones_own_is_shown_by_its_import_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "methods", "show", f"{__name__}.Unregistered")
    assert "with defaults that look like [bold]markup[/bold]" in text
    assert "│ needed │ required" in text
    assert "'[red]'" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["methods", "show", "fedreb"], "got 'fedreb'. Did you mean 'FedRep'?"),
        (["methods", "show", "torch.nn.Linear"], "Expected NAME to be a method or its import path"),
        (["methods", "show", "zzz"], "`lightning-pfl methods list` shows them"),
        (["recipes", "show", "fedrep_digit"], "Did you mean 'fedrep_digits'?"),
        (["recipes", "copy", "zzz"], "`lightning-pfl recipes list` shows them"),
        (["recipes"], "the following arguments are required"),
        (["recipes", "copy", "fedrep_digits", "no/folder/here.yaml"], "No such file"),
    ],
)
def test_what_is_not_there_is_an_error_in_a_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert message in text
    # The usage is shown where the words don't fit it, and then the command's own.
    usage = "usage: lightning-pfl recipes " if "following arguments" in message else "error: "
    assert text.startswith(usage)


def test_the_list_has_every_recipe_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "recipes", "list").splitlines()
    files = [*ROOT.glob("recipes/*.yaml"), *ROOT.glob("configs/*/*.yaml")]
    assert sorted(find_recipes().values()) == sorted(files)
    for name, path in find_recipes().items():
        (row,) = [line for line in lines if line.startswith(f"│ {name} ")]
        assert path.read_text().partition("\n")[0].removeprefix("#").strip()[:20] in row
    (row,) = [line for line in lines if line.startswith("│ fedrep_digits ")]
    assert "│ FedRep " in row


@pytest.mark.parametrize("name", ["fedrep_digits", "recipes/fedrep_digits.yaml", "method/fedper"])
def test_a_recipe_is_shown_as_it_is_and_a_copy_names_itself(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = said(capsys, "recipes", "show", name)
    source = find_recipes()[name.removeprefix("recipes/").removesuffix(".yaml")]
    assert text == source.read_text()
    printed = said(capsys, "recipes", "copy", name, str(tmp_path))
    copy = tmp_path / source.name
    path = source.relative_to(ROOT)
    assert copy.read_text() == text.replace(str(path), str(copy))
    assert f"--config {copy}" in printed
    said(capsys, "recipes", "copy", name, str(tmp_path / "mine.yaml"))
    mine = tmp_path / "mine.yaml"
    assert mine.read_text() == text.replace(str(path), str(mine))
    assert str(path) not in mine.read_text()


def test_a_copy_overwrites_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "fedrep_digits.yaml").write_text("mine")
    with pytest.raises(SystemExit):
        main(["recipes", "copy", "fedrep_digits", str(tmp_path)])
    assert "which exists. Remove it" in capsys.readouterr().err
    assert (tmp_path / "fedrep_digits.yaml").read_text() == "mine"


def test_an_installation_without_recipes_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "__file__", str(tmp_path / "lightning_pfl" / "cli" / "x.py"))
    monkeypatch.setattr(catalogue, "INSTALLED", ("share", "nothing-of-ours"))
    with pytest.raises(SystemExit):
        main(["recipes", "list"])
    assert "Expected recipes in this installation" in capsys.readouterr().err


def test_the_help_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["--version"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "methods show NAME" in text
    assert text.splitlines()[-1].split()[-1] == __version__


@pytest.mark.slow
def test_an_installed_wheel_has_the_recipes(tmp_path: Path) -> None:
    """Outside of the checkout; the other packages are those of this environment."""

    def run(*command: str) -> str:
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    source = tmp_path / "source"  # a build leaves files beside its sources
    for name in ("lightning_pfl", "recipes", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run(*wheel, "--quiet", "--wheel-dir", str(tmp_path), str(source))
    (file,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", str(file))
    # What this environment has, but not the checkout that it has installed.
    packages = [path for path in sys.path if path.endswith("-packages")]
    (Path(target) / "packages.pth").write_text("\n".join(packages))
    where = run(python, "-c", "import lightning_pfl; print(lightning_pfl.__file__)").strip()
    assert where.startswith(target)
    program = str(tmp_path / "venv" / "bin" / "lightning-pfl")
    assert "FedRep" in run(program, "methods", "list")
    listed = run(program, "recipes", "list")
    assert all(f"│ {name} " in listed for name in find_recipes())
    run(program, "recipes", "copy", "fedrep_digits", "mine.yaml")
    recipe = ROOT / "recipes" / "fedrep_digits.yaml"
    copied = recipe.read_text().replace("recipes/fedrep_digits.yaml", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == copied != recipe.read_text()
    assert run(program, "--version").split() == ["lightning-pfl", __version__]


@pytest.mark.slow
def test_a_reader_that_stops_ends_the_command_without_a_traceback() -> None:
    command = [sys.executable, "-m", "lightning_pfl", "recipes", "show", "fedrep_digits"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (1, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# FedRep: ten epochs\n# of the head.\na: 1\n", "FedRep: ten epochs of the head."),
        ("# A model that\n# is shared. More.\n", "A model that is shared."),
        ("# As in Oh et al. 2022, frozen. More\n", "As in Oh et al. 2022, frozen."),
        ("# Evaluate with:\n#   lightning-pfl test\n", "Evaluate with"),
        ("a: 1  # one\n", ""),
    ],
)
def test_a_list_says_the_first_sentence_of_a_recipe(text: str, expected: str) -> None:
    assert catalogue._first_sentence(text) == expected
