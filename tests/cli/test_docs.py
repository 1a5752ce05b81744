"""The pages of docs/: their code runs, and their tables are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_pfl import methods, metrics, solvers
from lightning_pfl.graphs import resolve_graph
from lightning_pfl.methods.base import Method

ROOT = Path(__file__).resolve().parents[2]
RELATIONS = (ROOT / "docs" / "relations.md").read_text()
EVALUATION = (ROOT / "docs" / "evaluation.md").read_text()


@pytest.mark.filterwarnings("ignore")
def test_the_code_of_relations_runs_and_finds_the_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", RELATIONS, re.DOTALL):
        exec(block, names)
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


def test_every_method_says_which_models_are_evaluated() -> None:
    table = EVALUATION.split("| method | personal model | global model |\n")[1].split("\n\n")[0]
    named = [
        name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(methods.__all__)


@pytest.mark.parametrize("package", [metrics, solvers])
def test_public_names_are_there_also_those_that_are_loaded_late(package: Any) -> None:
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = package.missing
