"""The per-client tables of a run as a data frame."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

import lightning_pfl
from lightning_pfl import FederatedStrategy, read_clients
from lightning_pfl.methods import Ditto
from lightning_pfl.testing import QuadraticModule, quadratic_clients
from lightning_pfl.trainer.client_table import ClientTable

HEAD = "round,client,num_samples,val_acc,global/val_acc,ft/val_acc,val_loss/extra\n"


def test_each_value_is_a_row_with_its_model(tmp_path: Path) -> None:
    rows = "0,007,4,0.5,0.25,,1.5\n0,NA,2,nan,0.75,,0.5\n1,007,4,0.5,0.25,1.0,1.5\n1,NA,2,0."
    (tmp_path / "clients_val.csv").write_text(HEAD + rows)
    (tmp_path / "clients_test.csv").write_text("round,client,num_samples,test_acc\n1,007,3,0.125\n")
    table = read_clients(tmp_path)
    first = ("val", 0, "007", 4)
    assert [tuple(row) for row in table.itertuples(index=False)][:3] == [
        (*first, "personal", "val_acc", 0.5),
        (*first, "global", "val_acc", 0.25),
        (*first, "personal", "val_loss/extra", 1.5),
    ]
    assert table.query("model == 'fine-tuned'")["value"].tolist() == [1.0]
    assert table.query("client == 'NA' and metric == 'val_acc' and model == 'personal'")[
        "value"
    ].isna().tolist() == [True]
    # The half of a line at the end is no row of client NA.
    assert table.query("split == 'val' and round == 1")["client"].unique().tolist() == ["007"]
    last = table.query("split == 'test'")
    assert last[["client", "samples", "value"]].values.tolist() == [["007", 3, 0.125]]


@pytest.mark.filterwarnings("ignore")
def test_the_means_are_those_of_the_run(tmp_path: Path) -> None:
    data = quadratic_clients([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    logger = CSVLogger(tmp_path)
    trainer = L.Trainer(
        max_epochs=2, strategy=FederatedStrategy(Ditto()), logger=logger, accelerator="cpu"
    )
    trainer.fit(QuadraticModule(), data, data)
    table = read_clients(str(trainer.log_dir)).query("round == 1")
    means = table.groupby(["model", "metric"])["value"].mean()
    for (model, metric), mean in means.items():
        key = metric if model == "personal" else f"global/{metric}"
        assert mean == pytest.approx(float(trainer.callback_metrics[key]), rel=1e-6)
    assert set(table["model"]) == {"personal", "global"}
    with pytest.raises(ValueError, match=r"Choose one of .*version_0\."):
        read_clients(tmp_path)


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected `run` to be a folder .* got run='.*log_dir"):
        read_clients(tmp_path)
    assert "read_clients" in lightning_pfl.__all__


def test_names_that_the_table_guards_are_read_as_they_are(tmp_path: Path) -> None:
    names = ["=1+1", "'quoted", "007", "NA"]
    ClientTable(tmp_path / "clients_val.csv").append(0, names, [1] * 4, {"val_acc": [0.5] * 4})
    assert read_clients(tmp_path)["client"].tolist() == names
