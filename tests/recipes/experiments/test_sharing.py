"""A small version of accuracy against samples and participation, and which runs it needs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from lightning_pfl.data import FashionMNIST
from recipes.experiments import sharing
from recipes.experiments.sharing import (
    CLASSES,
    CLIENTS,
    LINES,
    METHODS,
    PARTICIPATIONS,
    SAMPLES,
    USUAL,
    Fewer,
    Point,
    Stored,
    cell,
    planned,
)
from recipes.outcome import RECIPES
from recipes.plan import Plan
from tests.recipes.experiments.here import cells_of, readme_for, text_of


@pytest.mark.slow
def test_runs_once_and_writes_what_is_stored(tmp_path: Path, fashion_mnist_dir: Path) -> None:
    readme = readme_for("sharing", tmp_path)
    arguments = ["--small", "--seeds", "0", "--data-dir", str(fashion_mnist_dir)]
    arguments += ["--results", str(tmp_path), "--figures", str(tmp_path), "--readme", str(readme)]
    sharing.main(arguments)
    stored = (tmp_path / "sharing.jsonl").read_text()
    cells = cells_of(tmp_path / "sharing.jsonl")
    # At 2 and at 5 classes: LocalOnly for 1 round and for 2, FedAvg with its tuned heads.
    assert len(cells) == 6
    text = text_of(readme)
    found = cells["FedAvg (2, 10) 0.1 2 rounds seed=0"]
    for line, name in {"FedAvg": "acc", "FedAvg + FT": "ft_acc"}.items():
        assert f"{100 * found[name]:.2f}" in text.split(f"| {line} |")[1].split("|")[0]
    assert "6 of 132 runs are done" in text
    pixels = imread(tmp_path / "sharing.png").reshape(-1, 4)
    assert len(np.unique(pixels, axis=0)) > 3

    sharing.main(arguments)  # nothing is left to run
    assert (tmp_path / "sharing.jsonl").read_text() == stored
    assert readme.read_text() == text


def test_every_method_makes_as_many_passes_over_a_clients_data() -> None:
    """In a round, of head and body together; and, with equal passes, in a run, on average."""
    for make in METHODS.values():
        given = vars(make())
        names = ["head_epochs", "body_epochs"] if "body_epochs" in given else ["local_epochs"]
        assert sum(given[name] for name in names) == sharing.EPOCHS
    for participation in PARTICIPATIONS:
        for line in LINES:
            run = cell(line, (5, 50, participation, False), sharing.ROUNDS, 0)
            passes = run.rounds * run.participation
            expected = sharing.ROUNDS * (1.0 if line == sharing.EQUAL_ROUNDS else USUAL)
            assert passes == pytest.approx(expected)
            equal = cell(line, (5, 50, participation, True), sharing.ROUNDS, 0)
            assert equal.rounds == (10 if line == sharing.PASSES else sharing.ROUNDS)


def test_the_plan_has_every_point_once_and_the_short_runs_first() -> None:
    runs = list(planned([0, 1]))
    assert len(runs) == len(set(runs)) == len({run.key for run in runs})
    first = [run for run in runs if run.seed == 0]
    work = [run.samples * run.rounds * run.participation for run in first]
    assert work == sorted(work)
    # LocalOnly twice, the others once at each point; participation only for the others.
    grid = len(SAMPLES) * len(CLASSES) * (len(METHODS) + 1)
    varied = 2 * (len(PARTICIPATIONS) - 1) * (len(METHODS) - 1)
    assert len(first) == grid + varied


def test_fewer_images_are_as_many_of_each_class(fashion_mnist_dir: Path) -> None:
    """The training images are the first ones of the file; the test images are all there."""
    whole = FashionMNIST(str(fashion_mnist_dir)).load()
    part = Fewer(FashionMNIST(str(fashion_mnist_dir)), 3).load()
    labels = part.fields[1].tolist()
    assert [labels.count(label) for label in range(10)] == [3] * 10
    assert part.labels.tolist() == labels
    seen: dict[int, int] = {}
    kept = []
    for position, label in enumerate(whole.fields[1].tolist()):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= 3:
            kept.append(position)
    assert torch.equal(part.fields[0], whole.fields[0][kept])
    assert part.test_fields is not None
    assert whole.test_fields is not None
    for here, there in zip(part.test_fields, whole.test_fields, strict=True):
        assert torch.equal(here, there)
    assert CLIENTS * min(SAMPLES) % 10 == 0


def test_the_page_on_choosing_says_what_is_stored() -> None:
    """The numbers of its first section, and its claims, over the seeds that all methods have."""
    stored = Stored(Plan("sharing"), [0, 1, 2], sharing.ROUNDS)
    # Longer local training, the longest runs, is compared by itself.
    lines = [line for line in LINES if line != sharing.EQUAL_ROUNDS]

    def means(point: Point) -> dict[str, float]:
        values = {line: stored.values(line, point) for line in lines}
        shared = set(stored.seeds).intersection(*values.values())
        return {line: float(np.mean([100 * values[line][s] for s in shared])) for line in lines}

    found = {(c, n): means((c, n, USUAL, True)) for c, n in product(CLASSES, SAMPLES)}
    lost = {key: max(each.values()) - each[sharing.PASSES] for key, each in found.items()}
    text = (RECIPES.parent / "docs" / "choosing.md").read_text()
    _, _, section = text.partition("## Where local training stops")
    section = " ".join(section.partition("\n## ")[0].split())
    for sentence in (
        f"loses {lost[2, 10]:.1f} points on the best method at 10 images, less than one from 50 "
        f"on, and {lost[2, 600]:.1f} at 600.",
        f"five classes it loses {lost[5, 10]:.1f} at 10 images, {lost[5, 50]:.1f} at 50, and still "
        f"{lost[5, 600]:.1f} at 600",
    ):
        assert sentence in section
    assert max(lost[2, samples] for samples in SAMPLES[2:]) < 1
    assert lost[2, 20] > 1
    for (classes, samples), each in found.items():
        alone, best = each[sharing.PASSES], max(each.values())
        assert alone < best
        assert each["FedAvg"] < alone + 0.5
        assert classes == 5 or 18.5 < alone - each["FedAvg"] < 20.5
        assert min(each[sharing.TUNED], each["APFL"]) > best - 1.1
        below = (classes == 2 and samples >= 20) or samples == 600
        for name in ("FedRep", "Ditto"):
            assert (each[name] < alone) == below
        passes, rounds = (
            stored.values(line, (classes, samples, USUAL, True))
            for line in (sharing.PASSES, sharing.EQUAL_ROUNDS)
        )
        assert all(abs(rounds[seed] - passes[seed]) < 0.005 for seed in rounds)
        point = classes, samples, USUAL, True
        for seed, value in rounds.items():
            others = [stored.values(line, point) for line in lines]
            assert value < max(values[seed] for values in others if seed in values)
    few, every = (means((5, 50, participation, False)) for participation in (USUAL, 1.0))
    assert all(every[line] <= few[line] for line in lines)
    gone = few[sharing.TUNED] - every[sharing.TUNED]
    assert f"FedAvg with tuned heads loses {gone:.1f} points" in section


def test_the_best_line_is_that_of_the_seeds_which_all_lines_have() -> None:
    """A line's lucky second seed, which the others lack, counts for nothing."""
    point = 2, 10, USUAL, True
    stored = Stored(Plan("sharing"), [0, 1], sharing.ROUNDS)
    for line in LINES:
        for seed, value in ((0, 0.5 + 0.1 * (line == "Ditto")), (1, 0.9)):
            run = cell(line, point, sharing.ROUNDS, seed)
            kept = seed == 0 or line == "FedPer"
            stored.found[run] = {"acc": value, "ft_acc": value} if kept else None
    assert stored.best(point) == "Ditto"
    stored.found[cell("FedRep", point, sharing.ROUNDS, 0)] = None
    assert stored.best(point) is None
