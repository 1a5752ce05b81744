"""Comparisons of logs whose means, deviations and differences are known."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
from lightning.pytorch.loggers import CSVLogger

import lightning_pfl
from lightning_pfl import FederatedStrategy
from lightning_pfl.cli.command_line import main
from lightning_pfl.methods import FedAvg, LocalOnly
from lightning_pfl.results import Comparison, compare
from lightning_pfl.results.figures import Line, draw_clients, draw_fairness, draw_gains
from lightning_pfl.results.paired import pair
from lightning_pfl.results.runs import WINDOW
from lightning_pfl.results.scalars import read_scalars
from lightning_pfl.testing import QuadraticModule, quadratic_clients
from tests.results.logs import Way, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """FedRep above LocalOnly above FedAvg, with two seeds each."""
    for seed in (0, 1):
        for method, level in (("FedAvg", 0.25), ("LocalOnly", 0.5), ("FedRep", 0.625)):
            rounds = [[level + 0.125 * seed, level, level + 0.25] for _ in range(12)]
            rounds[0] = [0.0, 0.0, 0.0]  # not among the last ten
            write_run(tmp_path / "logs" / method / f"seed{seed}", method, rounds, seed=seed)
    return tmp_path / "logs"


def test_groups_are_means_over_seeds_best_first(logs: Path) -> None:
    table = compare(logs).table
    assert table["method"].tolist() == ["FedRep", "LocalOnly", "FedAvg"]
    means = [[(3 * level + 0.25 + 0.125 * seed) / 3 for seed in (0, 1)] for level in (0.625, 0.25)]
    for row, values in zip((0, 2), means, strict=True):
        assert table["val_acc"][row] == pytest.approx(statistics.mean(values))
        assert table["val_acc sd"][row] == pytest.approx(statistics.stdev(values))
    assert table["worst decile"].tolist() == [0.625, 0.5, 0.25]
    assert table["MB"].tolist() == [12 * 3.0] * 3  # a megabyte down and two up in each round
    assert table["runs"].tolist() == [2, 2, 2]
    assert len(range(12)) > WINDOW


def test_clients_are_counted_in_whole_numbers() -> None:
    values = {f"c{k}": k / 10 for k in range(4)}
    line = Line(0, "FedRep", clients=values)
    gain = pair(values, dict.fromkeys(values, 0.0), larger_is_better=True)
    assert gain is not None
    for figure in (draw_clients([line], "val_acc", True), draw_gains([line], {0: gain}, "FedAvg")):
        ticks = figure.axes[0].get_xticks()
        assert ticks.tolist() == ticks.round().tolist()


def test_differences_are_paired_by_client(logs: Path) -> None:
    rows = compare(logs).differences.set_index(["method", "against"])
    assert rows.loc[("FedRep", "LocalOnly")].to_dict() == {
        "data": "",
        "difference": pytest.approx(0.125),
        "low": pytest.approx(0.125),
        "high": pytest.approx(0.125),
        "better": 3,
        "worse": 0,
        "verdict": "above",
    }
    assert rows.loc[("FedAvg", "LocalOnly"), "verdict"] == "below"
    assert compare(logs, baselines=["FedRep"]).differences["against"].unique() == ["FedRep"]


def test_the_interval_is_the_bootstraps() -> None:
    generator = np.random.default_rng(1)
    gains = generator.normal(0.1, 0.3, size=40)
    method = {f"c{i}": float(gain) for i, gain in enumerate(gains)}
    found = pair(method, dict.fromkeys(method, 0.0), larger_is_better=True)
    assert found is not None
    means = generator.choice(gains, size=(20000, 40)).mean(1)
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.01)
    assert (found.better, found.worse) == ((gains > 0).sum(), (gains < 0).sum())
    loss = pair(method, dict.fromkeys(method, 0.0), larger_is_better=False)
    assert loss is not None
    assert loss.mean == -found.mean
    assert pair(method, {}, larger_is_better=True) is None


def test_a_difference_within_chance_is_not_called_above() -> None:
    method = {"a": 1.0, "b": -1.0, "c": 0.5, "d": -0.5}
    found = pair(method, dict.fromkeys(method, 0.0), larger_is_better=True)
    assert found is not None
    assert found.verdict == "no difference seen"


def test_stopped_runs_are_named_and_join_after_as_many_rounds(logs: Path) -> None:
    stopped = [[0.75] * 3] * 4
    write_run(logs / "FedRep" / "seed2", "FedRep", stopped, seed=2, planned=12, ended=False)
    comparison = compare(logs)
    assert comparison.table["runs"].tolist() == [2, 2, 2]
    assert f"Left out, stopped after 4 of 12 rounds: {logs / 'FedRep' / 'seed2'}." in " ".join(
        comparison.notes
    )
    early = compare(logs, rounds=4)
    assert early.table["runs"].tolist() == [3, 2, 2]
    values = [(0.0 + 3 * (3 * 0.625 + 0.25 + 0.125 * s) / 3) / 4 for s in (0, 1)] + [0.75]
    assert early.table["val_acc"][0] == pytest.approx(statistics.mean(values))
    assert early.table["rounds"].tolist() == ["4", "4", "4"]


def test_a_run_that_failed_before_it_logged_is_named(logs: Path) -> None:
    failed = write_run(logs / "FedRep" / "seed2", "FedRep", [[0.5] * 3], seed=2, planned=12)
    for name in ("metrics.csv", "clients_val.csv"):
        (failed / name).unlink()
    (logs / "other").mkdir()
    (logs / "other" / "config.yaml").write_text("colour: blue\n")  # another program's
    comparison = compare(logs)
    assert comparison.table["runs"].tolist() == [2, 2, 2]
    assert [note for note in comparison.notes if "first round" in note] == [
        f"Left out, failed or stopped in the first round, or logged elsewhere: {failed}."
    ]
    assert "other" not in " ".join(map(str, comparison.runs["folder"]))
    with pytest.raises(
        ValueError, match=r"Expected runs with logged values.*seed2.*settings alone"
    ):
        compare(failed)


def test_settings_that_differ_make_groups_and_seeds_do_not(tmp_path: Path) -> None:
    for weight in (0.1, 1.0):
        for seed in (0, 1):
            folder = tmp_path / f"{weight}-{seed}"
            write_run(folder, "FedProx", [[weight / 2] * 3] * 2, seed=seed, prox_weight=weight)
    comparison = compare(tmp_path)
    assert comparison.table["method"].tolist() == [
        "FedProx (prox_weight 1)",
        "FedProx (prox_weight 0.1)",
    ]
    assert comparison.settings.index.tolist() == ["method.prox_weight"]
    assert comparison.settings.values.tolist() == [["1", "0.1"]]
    assert any("on one split of the data" in note for note in comparison.notes)


def test_runs_from_python_and_of_the_command_line_are_one_row(tmp_path: Path) -> None:
    ways: list[Way] = ["both", "python", "both"]
    for seed, started_by in enumerate(ways):
        values = [[0.25 * (1 + seed)] * 3] * 2
        write_run(tmp_path / str(seed), "FedProx", values, seed, started_by=started_by, mu=0.1)
    write_run(tmp_path / "other", "FedProx", [[1.0] * 3] * 2, 0, started_by="python", mu=1.0)
    comparison = compare(tmp_path)
    table = comparison.table.set_index("method")
    assert table["runs"].to_dict() == {"FedProx (mu 1)": 1, "FedProx (mu 0.1)": 3}
    assert table["val_acc"]["FedProx (mu 0.1)"] == pytest.approx(0.5)
    assert not table["data"].any()
    assert comparison.settings.index.tolist() == ["method.mu"]


def test_a_run_from_python_chooses_no_row_where_two_could_be_its_own(tmp_path: Path) -> None:
    ways: dict[str, Way] = {"a": "both", "b": "both", "python": "python"}
    for name, started_by in ways.items():
        write_run(tmp_path / name, "FedAvg", [[0.5] * 3] * 2, started_by=started_by)
    config = tmp_path / "b" / "config.yaml"
    config.write_text(config.read_text() + "optimizer: Adam\n")
    assert compare(tmp_path).table["runs"].tolist() == [1, 1, 1]


def test_a_run_left_out_changes_no_label(logs: Path) -> None:
    folder = logs / "FedRep" / "other"
    write_run(folder, "FedRep", [[0.5] * 3] * 2, planned=12, ended=False, head_epochs=3)
    comparison = compare(logs)
    assert comparison.table["method"].tolist() == ["FedRep", "LocalOnly", "FedAvg"]
    assert str(folder) in " ".join(comparison.notes)


def test_clients_without_a_number_are_left_out_and_counted(tmp_path: Path) -> None:
    nan = float("nan")
    write_run(tmp_path / "a", "FedAvg", [[0.5, 0.25, 0.5], [0.5, nan, nan], [1.0, 0.5, nan]])
    write_run(tmp_path / "b", "LocalOnly", [[0.25] * 3] * 3)
    for name in ("a", "b"):  # so that the values are those of the tables
        (tmp_path / name / "metrics.csv").unlink()
    comparison = compare(tmp_path)
    means = [(0.5 + 0.25 + 0.5) / 3, 0.5, 0.75]
    assert comparison.table["val_acc"][0] == pytest.approx(statistics.mean(means))
    of_clients = {"c0": (0.5 + 0.5 + 1.0) / 3, "c1": (0.25 + 0.5) / 2, "c2": 0.5}
    assert comparison.client_values[0] == pytest.approx(of_clients)
    gains = statistics.mean(value - 0.25 for value in of_clients.values())
    assert comparison.differences["difference"][0] == pytest.approx(gains)
    assert "up to 2 clients of a round have no number for val_acc" in " ".join(comparison.notes)


def test_runs_with_as_many_clients_without_a_number_are_one_note(tmp_path: Path) -> None:
    values = [[0.5, float("nan"), 0.25]] * 2
    runs = [write_run(tmp_path / str(seed), "FedAvg", values, seed) for seed in range(7)]
    for run in runs:
        (run / "metrics.csv").unlink()
    (note,) = (note for note in compare(tmp_path).notes if "no number" in note)
    assert note.startswith(f"{', '.join(map(str, runs[:5]))} and 2 more: up to 1 clients of")


def test_clients_of_other_partitions_are_other_clients(tmp_path: Path) -> None:
    for seed in (0, 1):
        for method, level in (("LocalOnly", 0.25), ("FedAvg", 0.5)):
            values = [[level + seed / 4] * 3] * 2
            write_run(tmp_path / f"{method}{seed}", method, values, seed, data_seed=seed)
    comparison = compare(tmp_path)
    assert comparison.differences["better"].tolist() == [6, 0]
    assert not any("one split" in note for note in comparison.notes)


def test_rounds_and_seeds_that_differ_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "FedAvg", [[0.5] * 3] * 3)
    write_run(tmp_path / "b", "LocalOnly", [[0.5] * 3] * 5, seed=1)
    notes = " ".join(compare(tmp_path).notes)
    assert "number of rounds (3, 5). Pass --rounds 3" in notes
    assert "Methods differ in the seeds" in notes


def test_a_broken_model_stays_in_the_table(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "FedAvg", [[0.5] * 3, [0.5, 0.5, float("nan")]])
    write_run(tmp_path / "b", "LocalOnly", [[0.5] * 3] * 2)
    comparison = compare(tmp_path)
    assert comparison.table["method"].tolist() == ["LocalOnly", "FedAvg"]
    assert np.isnan(comparison.table["val_acc"][1])
    assert any("ended in nan" in note for note in comparison.notes)
    # It has no differences either: its clients' values are those of the rounds before.
    assert comparison.differences.empty
    comparison.to_html(tmp_path / "page.html")
    str(comparison)


def test_values_come_from_the_table_where_the_logger_keeps_them_elsewhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "FedAvg", [[0.25, 0.5, 0.75]] * 2)
    (run / "metrics.csv").unlink()
    table = compare(run).table
    assert table["val_acc"].tolist() == [0.5]
    assert table["worst decile"].tolist() == [0.25]


def test_test_data_choose_nothing(logs: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected `metric` to be a validation value.*test_acc"):
        compare(logs, metric="test_acc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "val_f1"}, r"Expected `metric` to be one of \['val_acc'\], but got.*val_f1"),
        ({"rounds": 0}, r"Expected `rounds` to be at least 1, but got rounds=0"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    logs: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(logs, **arguments)  # type: ignore[arg-type]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected the folder of a run .* which has none"):
        compare(tmp_path)
    with pytest.raises(ValueError, match="Expected at least one run"):
        compare()


def test_event_files_are_read_up_to_a_cut_record(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for round in range(3):
            writer.add_scalar("val_acc", round / 4, round, walltime=100.0 + round)
            writer.add_scalar("round/clients", 2, round, walltime=102.0 + round)
        writer.add_histogram("clients/val_acc", np.arange(4), 2)
    (file,) = tmp_path.glob("events*")
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    found = read_scalars(tmp_path)
    assert found.values["val_acc"] == {0: 0.0, 1: 0.25, 2: 0.5}
    assert found.seconds[2] - found.seconds[1] == pytest.approx(1)


# --- files ----------------------------------------------------------------------------------------


def written(logs: Path, folder: Path) -> Path:
    names = ("csv", "markdown", "latex", "clients", "html")
    main(["compare", str(logs), *(w for n in names for w in (f"--{n}", str(folder / f"out.{n}")))])
    return folder


def test_the_command_writes_its_files(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(logs, tmp_path)
    out = capsys.readouterr().out
    assert "FedRep" in out
    assert "above" in out
    assert "one split of" in out
    for base in ("LocalOnly", "FedAvg"):
        assert f"What each client gains against {base}, in the mean\n" in re.sub(" +\n", "\n", out)
    table = (folder / "out.markdown").read_text().splitlines()
    assert table[0].startswith("| method | val_acc | worst decile |")
    assert table[2].startswith("| FedRep | 0.729 ± 0.029 | 0.625 |")
    assert r"0.729 $\pm$ 0.029" in (folder / "out.latex").read_text()
    assert (folder / "out.csv").read_text().startswith("data,method,val_acc,val_acc sd,")
    assert len((folder / "out.clients").read_text().splitlines()) == 1 + 3 * 3
    page = (folder / "out.html").read_text()
    assert page.count("<svg role") >= 8
    for label in (">round<", ">val_acc<", ">MB sent so far<", ">gain over LocalOnly<"):
        assert label in page
    # Nothing is loaded from anywhere: addresses are names of XML.
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_a_wrong_path_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "nowhere"])
    assert "but got 'nowhere', which isn't there." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1400, 500])
def test_a_browser_shows_the_page(logs: Path, tmp_path: Path, width: int) -> None:
    page = written(logs, tmp_path) / "out.html"
    common = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu"]
    picture = tmp_path / "page.png"
    size = [f"--window-size={width},2500", f"--screenshot={picture}"]
    subprocess.run([*common, *size, page.as_uri()], check=True, timeout=120, capture_output=True)
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    colours = np.unique((pixels * 255).astype(int).reshape(-1, 3), axis=0)
    # The lines' colours, so the pictures are drawn and not empty.
    for colour in ((0, 114, 178), (213, 94, 0), (0, 158, 115)):
        assert (np.abs(colours - colour).max(1) <= 2).any()
    script = subprocess.run(
        [*common, "--dump-dom", page.as_uri()], check=True, timeout=120, capture_output=True
    )
    assert "Who gains and who loses against FedAvg" in script.stdout.decode()


def test_it_is_part_of_the_package() -> None:
    assert lightning_pfl.compare is compare
    assert Comparison.__module__.startswith("lightning_pfl.results")


def test_the_code_of_the_documentation_runs(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(logs, logs / "logs" / "demo")
    monkeypatch.chdir(logs)
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text()
    (code, *_) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Comparison] = {}
    exec(code, names)
    assert names["comparison"].runs["counts"].tolist() == [True] * 6
    assert Path("compare.html").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_search_of_the_documentation_finds_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna", reason="optuna is an extra of its own")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text()
    (_, code) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(names["study"].trials) == 6
    assert set(names["study"].best_params) == {"prox_weight", "lr"}
    assert names["study"].best_value == max(
        trial.value for trial in names["study"].trials if trial.value is not None
    )
    exec(code, names)  # it goes on from its file
    assert len(names["study"].trials) == 12


@pytest.mark.filterwarnings("ignore")
def test_runs_in_python_are_compared_by_the_settings_that_their_loggers_got(tmp_path: Path) -> None:
    data = quadratic_clients([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    for method in (FedAvg, LocalOnly):
        for seed in (0, 1):
            trainer = L.Trainer(
                max_epochs=2,
                strategy=FederatedStrategy(method(local_epochs=2), seed=seed),
                logger=CSVLogger(tmp_path),
                accelerator="cpu",
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(QuadraticModule(lr=0.1), data, data)
    comparison = compare(tmp_path)
    assert comparison.metric == "val_loss"
    # Each client's own optimum is its best model, and a smaller loss is better.
    assert comparison.table["method"].tolist() == ["LocalOnly", "FedAvg"]
    assert comparison.table["runs"].tolist() == [2, 2]
    assert comparison.runs["seed"].tolist() == [0, 1, 0, 1]
    gain = comparison.differences.set_index("method").loc["LocalOnly"]
    loss = comparison.table.set_index("method")["val_loss"]
    assert gain["difference"] == pytest.approx(loss["FedAvg"] - loss["LocalOnly"], rel=1e-5)


def test_fairness_is_that_of_the_fine_tuned_models(tmp_path: Path) -> None:
    """The curve of a row "+ FT" is that of the models before; its dot is what the table says."""
    folder = write_run(tmp_path / "a", "FedAvg", [[0.25, 0.5, 0.75], [0.5, 0.5, 0.5]])
    head, *rows = (folder / "metrics.csv").read_text().splitlines()
    rows = [f"{row},," for row in rows[:-1]] + [f"{rows[-1]},0.875,0.625"]
    head += ",ft/val_acc,ft/val_acc/worst_decile"
    (folder / "metrics.csv").write_text("\n".join([head, *rows]) + "\n")
    comparison = compare(tmp_path)
    assert comparison.table["method"].tolist() == ["FedAvg + FT"]
    line = comparison._line(0)
    assert line.end == (0.875, 0.625)
    (dot,) = draw_fairness([line], "val_acc").axes[0].collections
    assert np.asarray(dot.get_offsets()).tolist() == [[0.875, 0.625]]
    page = tmp_path / "page.html"
    comparison.to_html(page)
    # By round, the worst decile, and against bytes; the logs have no seconds.
    assert page.read_text().count("Where models are tuned at the end: before that.") == 3
    assert draw_fairness([Line(0, "without")], "val_acc").axes[0].collections[:] == []


def test_a_run_that_went_on_in_a_new_folder_says_which_rounds_it_lacks(logs: Path) -> None:
    folder = logs / "FedAvg" / "seed0"
    assert not any("went on" in note for note in compare(logs).notes)
    table = pd.read_csv(folder / "metrics.csv")
    table[~(table["epoch"] < 4)].to_csv(folder / "metrics.csv", index=False)
    (note,) = (note for note in compare(logs).notes if "went on" in note)
    assert "seed0 has no rounds before 4: it went on in a new folder." in note
