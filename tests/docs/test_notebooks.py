"""The notebooks of docs/ run, and show what they promise."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def run(name: str, folder: Path) -> Any:
    """Run a notebook in a kernel of its own, in an empty folder; returns it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def printed(notebook: Any) -> str:
    return "".join(o.text for o in outputs(notebook) if o.output_type == "stream")


def shown(notebook: Any, kind: str) -> list[str]:
    found = [
        o.data for o in outputs(notebook) if o.output_type in ("display_data", "execute_result")
    ]
    return [data[kind] for data in found if kind in data]


def ink(png: str) -> float:
    """Share of a picture's pixels that differ from its corner."""
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(base64.b64decode(png)))
    return float((abs(pixels - pixels[0, 0]).max(-1) > 0.1).mean())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    """What the site shows is then what the code does now."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    # Longer lines are cut off on the site.
    assert max(len(line.rstrip()) for cell in code for line in cell["source"]) <= 100
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel imports this checkout, with one thread, and matplotlib draws into the page."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
class TestRuns:
    def test_the_first_federation(self, tmp_path: Path) -> None:
        notebook = run("first_federation", tmp_path)
        assert "client " in printed(notebook)
        pictures = shown(notebook, "image/png")
        assert len(pictures) == 2
        assert min(map(ink, pictures)) > 0.05
        tables = shown(notebook, "text/html")
        assert len(tables) == 3
        for method in ("LocalOnly", "FedAvg", "Ditto"):
            assert method in tables[0]
        # The text says that learning together pays for these clients.
        assert tables[1].count("above") == 3
        assert list(tmp_path.iterdir()) == []

    def test_writing_a_method(self, tmp_path: Path) -> None:
        notebook = run("writing_a_method", tmp_path)
        assert printed(notebook).count("holds: ") == 3
        (table,) = shown(notebook, "text/html")
        assert table.count("mixing = ") == 3
        assert list(tmp_path.iterdir()) == []

    def test_a_prior_for_fedmap(self, tmp_path: Path) -> None:
        """The tails of the Cauchy prior let few parameters go further than the normal one."""
        notebook = run("fedmap_prior", tmp_path)
        assert min(map(ink, shown(notebook, "image/png"))) > 0.02
        lines = [part for part in printed(notebook).splitlines() if "root mean square" in part]
        normal, cauchy = (float(line.split()[-1]) for line in lines)
        assert cauchy > 1.5 * normal
