"""The pictures of docs/gallery.md: they are drawn, labelled, and kept."""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from docs import gallery

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("gallery.md", "comparing.md", "evaluation.md")]
NAMES = [*gallery.KEPT, *gallery.WINDOWS, "tensorboard.png"]
#: A graph has no axes.
WITHOUT_AXES = ("graph",)


def pixels(path: Path) -> Any:
    return (imread(path)[..., :3] * 255).astype(int)


def test_the_page_shows_every_picture_that_is_kept() -> None:
    shown = re.findall(r"\]\(figures/([\w.]+)\)", PAGES[0].read_text())
    assert sorted(shown) == sorted(NAMES)
    kept = {path.name for path in gallery.FIGURES.glob("*.png")}
    assert kept == set(NAMES)
    for page in PAGES[1:]:
        assert set(re.findall(r"\]\(figures/([\w.]+)\)", page.read_text())) <= kept


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All pictures, after few rounds, and the figures of those that matplotlib has drawn."""
    folder = tmp_path_factory.mktemp("gallery")
    figures: dict[str, Any] = {}
    write: Any = FigureCanvasAgg.print_png

    def keep(canvas: FigureCanvasAgg, path: Any, **settings: Any) -> Any:
        figures[Path(path).name] = canvas.figure
        return write(canvas, path, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FigureCanvasAgg, "print_png", keep)
        patch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)
        gallery.make(folder, folder / "logs", gallery.SMALL_ROUNDS)
    return folder, figures


@pytest.mark.slow
@pytest.mark.skipif(gallery.CHROMIUM is None, reason="needs chromium, which photographs the pages")
@pytest.mark.filterwarnings("ignore")
class TestMade:
    def test_no_picture_is_empty(self, made: tuple[Path, dict[str, Any]]) -> None:
        folder, _ = made
        for name in NAMES:
            found = pixels(folder / name)
            drawn = (np.abs(found - found[-1, -1]).max(-1) > 20).mean()
            assert drawn > 0.03, name
            assert len(np.unique(found @ (65536, 256, 1))) > 20, name

    def test_axes_are_labelled(self, made: tuple[Path, dict[str, Any]]) -> None:
        _, figures = made
        assert len(figures) >= len(gallery.KEPT)
        for name, figure in figures.items():
            axes, *bars = figure.axes
            assert axes.get_title(), name
            if not name.startswith(WITHOUT_AXES):
                assert axes.get_xlabel(), name
                # Layers of a model are named one by one.
                named = [label.get_text() for label in axes.get_yticklabels()]
                assert axes.get_ylabel() or "head.weight" in named, name
            assert all(bar.get_ylabel() for bar in bars), name

    def test_the_page_of_a_comparison_has_its_text(self, made: tuple[Path, dict[str, Any]]) -> None:
        page = made[0] / "logs" / "compare.html"
        command = [str(gallery.CHROMIUM), "--headless=new", "--no-sandbox", "--dump-dom"]
        done = subprocess.run(
            [*command, page.as_uri()], check=True, timeout=120, capture_output=True, text=True
        )
        for text in ("FedRep", "LocalOnly", "FedAvg + FT", "val_acc by round", ">round<"):
            assert text in done.stdout
        # On a telephone nothing is wider than the window: its right edge is the page's colour.
        phone = pixels(made[0] / "compare_phone.png")
        assert phone.shape[1] == gallery.WINDOWS["compare_phone.png"][0]
        assert (phone[:, -3:] == phone[-1, -1]).all()

    def test_tensorboard_shows_lines_of_several_runs(
        self, made: tuple[Path, dict[str, Any]]
    ) -> None:
        """Its head is orange; below it, right of the settings, are charts of three methods."""
        found = pixels(made[0] / "tensorboard.png")
        assert (np.abs(found[5, 600] - (245, 124, 0)).max()) < 12
        charts = found[120:, 340:].reshape(-1, 3)
        # The colours of the runs that TensorBoard gives: orange, blue, red.
        for colour in ((255, 112, 67), (0, 119, 187), (204, 51, 17)):
            assert (np.abs(charts - colour).max(1) < 12).sum() > 50, colour
