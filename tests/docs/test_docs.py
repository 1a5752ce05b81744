"""The pages of docs/: their code runs, and their tables are complete."""

from __future__ import annotations

import re
import shlex
import sys
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning import Trainer

from lightning_pfl import (
    FederatedDataModule,
    FederatedStrategy,
    PersonalizedModule,
    load_clients,
)
from lightning_pfl.cli.command_line import PFLCLI, main
from lightning_pfl.graphs import resolve_graph
from lightning_pfl.methods import FedAvg, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.models import MLP
from lightning_pfl.testing import CHECKS

ROOT = Path(__file__).resolve().parents[2]
RELATIONS = (ROOT / "docs" / "relations.md").read_text()
DATA = (ROOT / "docs" / "data.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
COMING_FROM = (ROOT / "docs" / "coming_from.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def run_blocks(page: str) -> dict[str, Any]:
    """Run a page's Python, one block after another; returns the names that it has made."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    return names


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages write files to the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_code_of_relations_runs_and_finds_the_groups() -> None:
    names = run_blocks(RELATIONS)
    truth = names["TRUTH"]
    assert names["agreement"] == 1.0
    assert names["ifca"].callback_metrics["clusters/ari"] == 1.0
    assert names["cfl"].callback_metrics["clusters/ari"] == 1.0
    assert names["mean_norm"] < 0.5 * names["max_norm"]
    counts = [int(row.max()) + 1 for row in names["found"]]
    assert counts[-1] == 1
    assert 3 in counts
    low, high = names["interval"]
    assert low <= names["weights"][2] <= high < names["together"]
    assert names["one"].hold
    ends = names["graph"].edges.T.tolist()
    assert all(truth[i] == truth[j] for i, j in ends)
    assert names["graph"].components == 3
    assert type(names["sheaf"].strategy.client_module(1).backbone).__name__ == "Sequential"

    (text,) = re.findall(r"```yaml\n(.*?)```", RELATIONS, re.DOTALL)
    parser = ArgumentParser()
    parser.add_subclass_arguments(Method, "method")
    built = parser.instantiate_classes(parser.parse_object(yaml.safe_load(text)))
    made = resolve_graph(built.method.given_graph, len(truth))
    assert made.edges.tolist() == names["graph"].edges.tolist()


class Dirichlet:
    """What the page's partitioner of flwr-datasets looks like from outside; the draw is plain."""

    dataset: Any = None

    def __init__(self, num_partitions: int, partition_by: str, **settings: Any) -> None:
        self.num_partitions, self.column = num_partitions, partition_by
        assert settings.keys() == {"alpha", "min_partition_size", "seed"}

    def load_partition(self, partition_id: int) -> Any:
        rows = range(partition_id, len(self.dataset[self.column]), self.num_partitions)
        return self.dataset.select(list(rows))


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for flwr-datasets, which brings far more than the tests need."""
    package = ModuleType("flwr_datasets")
    partitioner = ModuleType("flwr_datasets.partitioner")
    partitioner.DirichletPartitioner = Dirichlet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr_datasets", package)
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", partitioner)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("flower")
def test_the_code_of_data_runs_and_gives_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    names = run_blocks(DATA)
    strategy = names["trainer"].strategy
    assert strategy.client_names == ("east", "north", "south", "west")
    # No model for all is right more often than 3 times of 4: half of the clients agree with it.
    assert float(names["accuracy"]) > 0.85
    # 50 samples each, a fifth of them for the test and a fifth of the rest for validation.
    assert names["waves"].train_dataloader().num_samples.tolist() == [32] * 8
    assert names["growing"].train_dataloader().num_samples.tolist() == [80, 160, 240, 320]
    assert names["skewed"].num_clients == 5
    assert names["own"].strategy.client_names == ("left", "right")

    test = names["data"].predict_dataloader()
    inputs, labels = test.gather(test.indices[3])
    assert [len(part) for part in names["outputs"]] == [1, 1, 1, 1]
    assert names["outputs"][0][0].shape == (30, 2)
    wanted = strategy.client_module("west")(inputs).argmax(1)
    assert torch.equal(names["classes"], wanted)
    better = sorted(["worse", "better"]).index("better")
    assert torch.equal(inputs[:, 0] - inputs[:, 1] > 0, labels == better)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_csv_part_trains_on_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (first, *_) = re.findall(r"```python\n(.*?)```", DATA, re.DOTALL)
    exec(first, {})
    (command,) = re.findall(r"```\nlightning-pfl (fit .*?)```", DATA, re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    words = [str(ROOT / word) if word.endswith(".yaml") else word for word in words]
    quick = ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.logger"]
    PFLCLI([*words, *quick, "false"])
    (file,) = tmp_path.rglob("last.ckpt")
    clients = load_clients(file, MLP([2, 8, 2]), FedRep(head_epochs=10))
    assert list(clients.client_names) == ["east", "north", "south", "west"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_code_of_models_runs_and_gives_what_it_says() -> None:
    names = run_blocks(MODELS)
    wanted = names["strategy"].client_state_dict(3)
    for found in (
        names["mine"].state_dict(),
        names["state"],
        names["again"].strategy.client_state_dict(3),
        names["plain"].state_dict(),
    ):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    inputs, mine = names["inputs"], names["mine"]
    for count in (1, 5, len(inputs)):
        assert torch.equal(names["exported"](inputs[:count]), mine(inputs[:count]))
    shared = names["shared"].state_dict()
    heads = {name for name in wanted if name.startswith("head.")}
    assert all(torch.equal(shared[name], wanted[name]) for name in wanted.keys() - heads)
    assert not any(torch.equal(shared[name], wanted[name]) for name in heads)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_that_are_several_are_exported_as_one() -> None:
    page = MODELS.split("## Tomorrow")[0].replace("import FedRep", "import FedEM")
    page = page.replace("FedRep()", "FedEM(components=2)")
    # A mixture has no state_dict.
    names = run_blocks(page.replace("strategy.client_state_dict(3) ", "pass"))
    export = MODELS.split("## Without Lightning")[1]
    held = names["data"].val_dataloader()
    inputs, _ = held.gather(held.indices[3])
    names |= {"torch": torch, "inputs": inputs, "clients": names["strategy"]}
    (block,) = re.findall(r"```python\n(.*?)```", export, re.DOTALL)
    exec(block, names)
    wanted = names["strategy"].client_module(3)(inputs)
    torch.testing.assert_close(names["exported"](inputs), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_code_for_those_who_come_from_elsewhere_learns_a_head_each() -> None:
    trainer = run_blocks(COMING_FROM)["trainer"]
    # One model for all can't be right for two clients at once, who disagree; guessing has 1/3.
    assert float(trainer.callback_metrics["val_acc"]) > 0.6
    models = [trainer.strategy.client_state_dict(k) for k in range(4)]
    assert not torch.equal(models[0]["net.fc.weight"], models[2]["net.fc.weight"])
    assert torch.equal(models[0]["net.base.0.weight"], models[2]["net.base.0.weight"])


def test_the_arguments_that_others_are_told_of_exist() -> None:
    """Each ``--method.x``, ``--data.x``, ... is one of its class."""
    given = re.findall(r"`--([\w.+]+)", re.sub(r"^\| [^|]* \|", "|", COMING_FROM, flags=re.M))
    known = {
        "data": {*signature(FederatedDataModule).parameters},
        "model": {*signature(PersonalizedModule).parameters},
        "trainer": {*signature(Trainer).parameters},
        "trainer.strategy": {*signature(FederatedStrategy).parameters},
        "method": {*signature(FedAvg).parameters, *signature(FedRep).parameters},
        "data.partition": {"alpha"},
    }
    found = [argument.rpartition(".") for argument in given if "." in argument]
    assert len(found) > 10
    assert [
        f"{where}.{name}" for where, _, name in found if name and name not in known.get(where, ())
    ] == []


@pytest.mark.slow
def test_the_method_of_a_package_of_ones_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file, the conformance suite on it, its closed form, and the command line."""
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
    (tmp_path / "my_package.py").write_text(blocks[0])
    monkeypatch.syspath_prepend(tmp_path)
    try:
        names = run_blocks("".join(f"```python\n{block}```\n" for block in blocks[1:]))
        test = names["test_conformance"]
        values = {mark.args[0]: mark.args[1] for mark in test.pytestmark}
        assert values["engine"] == ["vectorized", "sequential"]
        assert values["check"] == CHECKS
        for check in CHECKS:
            test(check, "vectorized", tmp_path)

        (commands,) = re.findall(
            r"```\n(lightning-pfl recipes copy.*?)```", CONTRIBUTING, re.DOTALL
        )
        copy, run, show = (shlex.split(line)[1:] for line in commands.splitlines())
        quick = ["--trainer.fast_dev_run", "true", "--trainer.accelerator", "cpu"]
        for words in (copy, [*run, *quick], show):
            main(words)
        assert "server_lr" in capsys.readouterr().out
    finally:
        sys.modules.pop("my_package", None)
