"""`lightning-pfl partition`: the counts and the picture of a data section."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from lightning_pfl import FederatedDataModule
from lightning_pfl.cli.command_line import main
from lightning_pfl.cli.partition import print_counts
from lightning_pfl.data import ClassesPerClient, Digits, FederatedTensorDataset, label_counts

DIGITS = str(Path(__file__).resolve().parents[2] / "recipes" / "fedrep_digits.yaml")


def test_the_counts_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    picture = tmp_path / "pictures" / "partition.png"
    words = ["partition", "--config", DIGITS, "--data.num_clients", "6", "--picture", str(picture)]
    main(words)
    out = capsys.readouterr().out
    data = FederatedDataModule(
        Digits(), ClassesPerClient(5), num_clients=6, val_fraction=0.2, batch_size=10
    )
    data.setup("fit")
    train = data.train_dataloader()
    counts = label_counts(train)
    assert counts is not None
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()}
    for client, row in enumerate(counts.tolist()):
        assert rows[str(client)] == [str(sum(row)), *(str(n) if n else "." for n in row)]
    assert f"6 clients, {int(counts.sum())} samples" in out
    assert "ClassesPerClient(5) may draw a class twice for a client" in out
    assert len({tuple(pixel) for pixel in imread(picture).reshape(-1, 4)[::7].tolist()}) > 10


def test_thousands_of_samples_of_ten_classes_fit_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    labels = torch.arange(10).repeat_interleave(1053)
    print_counts(FederatedTensorDataset((labels, labels), [range(len(labels))]))
    assert ["0", "10530", *["1053"] * 10] in map(str.split, capsys.readouterr().out.splitlines())


def test_a_wrong_data_section_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["partition", "--config", DIGITS, "--data.num_clients", "0"])
    assert "Expected `num_clients`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["partition", "--config", str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err
