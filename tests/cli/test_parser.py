"""What the command line says where something is misspelt, out of range, missing or of one's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl import methods
from lightning_pfl.cli.command_line import PFLCLI, main
from lightning_pfl.cli.parser import (
    explain,
    in_a_line,
    nearest,
)

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "fedrep_digits.yaml")
CPU = ["--trainer.accelerator", "cpu"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed before the program ends with a usage error."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", RECIPE, *CPU, *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        (["--method.head_epoch", "4"], "head_epochs"),
        (["--model.moment", "4"], "momentum"),
        (["--data.init_args.batchsize", "4"], "batch_size"),
        (["--data.partition", "ClassPerClient"], "ClassesPerClient"),
        (["--model", "DigitCNN"], "DigitsCNN"),
        (["--model", "lightning_pfl.models.DigitCNN"], "DigitsCNN"),
        (["--trainer.strategy.participaton", "4"], "participation"),
        (["--trainer.max_epoch", "4"], "trainer.max_epochs"),
    ],
)
def test_the_nearest_name_is_suggested(
    wrong: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(capsys, *wrong)
    assert shown.rstrip().endswith(f"Did you mean {near!r}?")
    assert "usage:" not in shown


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--method.head_epoch", "4"], "an argument of FedRep, but got 'head_epoch'."),
        (["--data.source", "Digit"], "`data.source` to be a class, but got 'Digit'."),
        (
            ["--method.head_epochs", "x"],
            "`method.head_epochs` to be int, Mapping[str, int] or null, but got 'x'.",
        ),
        (["--trainer.max_epochs", "x"], "`trainer.max_epochs` to be int or null, but got 'x'."),
        (["--model.lr", "[1, 2]"], "`model.lr` to be float, but got '[1, 2]'."),
        (
            ["--trainer.strategy.participation", "many"],
            "`trainer.strategy.participation` to be int or float, but got 'many'.",
        ),
        (
            ["--data.partition.xyzzy", "1"],
            "an argument of ClassesPerClient, but got 'xyzzy'. Choose one of classes_per_client",
        ),
    ],
)
def test_a_wrong_name_or_type_is_told_in_a_line(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(capsys, *wrong)
    assert f"error: Expected {said}" in shown
    assert "Union" not in shown
    assert "Parser key" not in shown


@pytest.mark.parametrize(
    ("text", "near"),
    [("trainer: {max_epoch: 3}", "trainer.max_epochs"), ("modle: {lr: 1.0}", "model")],
)
def test_keys_of_a_file_are_suggested_too(
    text: str, near: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.yaml").write_text(text)
    assert f"Did you mean {near!r}?" in refused(capsys, "--config", str(tmp_path / "more.yaml"))


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("method: FedRep\nmodel: DigitsCNN\nmethod: FedAvg\n", "method", "1 and 3"),
        ("trainer:\n  max_epochs: 1\n  max_epochs: 2\n", "max_epochs", "2 and 3"),
        ("trainer:\n  callbacks:\n  - a: 1\n    a: 2\n", "a", "3 and 4"),
    ],
)
def test_a_key_that_a_file_has_twice_is_refused(
    text: str, key: str, lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "twice.yaml").write_text(text)
    shown = refused(capsys, "--config", str(tmp_path / "twice.yaml"))
    assert f"Expected each key once, but got {key!r} in lines {lines}. Remove one" in shown


@pytest.mark.parametrize(
    "wrong",
    [["--method", "FedRepp"], ["--method.help", "FedRepp"], ["--method", "lightning_pfl.FedRepp"]],
)
def test_an_unknown_method_is_told_with_those_that_there_are(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *wrong).splitlines()[-1]
    assert said.startswith(f"error: Expected `method` to be one of {', '.join(methods.__all__)}")
    assert said.endswith(f"but got method={wrong[1]!r}. Did you mean 'FedRep'?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "method: {class_path: lightning_pfl.method.FedAvg}",
            "method='lightning_pfl.method.FedAvg'. Did you mean 'FedAvg'?",
        ),
        (
            "method: {class_path: my_package.Mine}",
            "Expected `method` to be a class, but got 'my_package.Mine': No module named "
            "'my_package'. Install the package, or start where its file is.",
        ),
        (
            "trainer: {logger: {class_path: lightning.pytorch.loggers.CSVLoger}}",
            "Expected `trainer.logger` to be a class, but got 'lightning.pytorch.loggers.CSVLoger':"
            " module 'lightning.pytorch.loggers' has no attribute 'CSVLoger'.\nDid you mean "
            "'lightning.pytorch.loggers.CSVLogger'?",
        ),
        (
            "method: {class_path: torch.nn.Linear}",
            "Expected `method` to be a subclass of Method, but got 'torch.nn.Linear', which is "
            f"none. Choose one of {', '.join(methods.__all__)}.",
        ),
        (
            "data: {init_args: {partition: {class_path: FedAvg}}}",
            "Expected `data.partition` to be a subclass of Partition, but got 'FedAvg', which is "
            "none. Choose one of ",
        ),
        (
            "method: 3",
            "Expected `method` to be a class, but got 3. Write its name, or `class_path: NAME` and "
            "`init_args`.",
        ),
        (
            "data: {init_args: {source: {init_args: {folder: here}}}}",
            "Expected an argument of Digits, but got 'folder'. It takes none.",
        ),
        (
            "trainer: {strategy: {class_path: FederatedStrateg}}",
            "`trainer.strategy` to be a class, but got 'FederatedStrateg'.\nDid you mean "
            "'FederatedStrategy'?",
        ),
        (
            "model: {init_args: {learning: 1}}",
            "Expected an argument of DigitsCNN, but got 'learning'. Choose one of backbone, head,",
        ),
        (
            "method: {class_path: FedU}",
            "Expected FedU to be given graph, which has no default, but got none. Add "
            "--method.graph VALUE; what it takes: --method.help FedU.",
        ),
    ],
)
def test_a_wrong_class_of_a_recipe_is_told_in_a_sentence(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    shown = refused(capsys, "--config", str(tmp_path / "wrong.yaml"))
    assert said in shown
    assert "Parser key" not in shown
    assert "Union" not in shown


def test_a_class_of_another_kind_is_refused_in_a_flag_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("FedAvg", "lightning_pfl.methods.FedAvg"):
        shown = refused(capsys, "--model", name)
        assert f"`model` to be a subclass of LightningModule, but got '{name}', which" in shown
        assert "DigitsCNN" in shown


def test_a_method_that_is_like_none_has_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--method", "Xyz").rstrip().endswith("method='Xyz'. Choose one of them.")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            ["--method.head_epochs", "-1"],
            "Expected `head_epochs` to be a whole number >= 0, but got head_epochs=-1. Use 1, for "
            "example.",
        ),
        (["--trainer.strategy.participation", "-0.5"], "Expected `participation` to be a fraction"),
        (["--data.partition.classes_per_client", "0"], "Expected `classes_per_client` to be a pos"),
        (
            ["--trainer.strategy", "federatd"],
            "You selected an invalid strategy name: `strategy='fed",
        ),
        (["--trainer.max_epochs", "-7"], "`max_epochs` must be a non-negative integer or -1."),
    ],
)
def test_a_value_out_of_range_is_one_line_without_a_traceback(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(capsys, *wrong)
    assert shown.splitlines()[-1].startswith(f"error: {said}")
    assert "Traceback" not in shown
    assert "Union" not in shown


def test_a_strategy_that_is_not_federated_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["fit", "--config", RECIPE, *CPU, "--trainer.strategy", "auto"]
    with pytest.raises(SystemExit, match=r"^error: Expected a federated run, but .* SingleDev"):
        main(words)
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(MisconfigurationException, match="Expected a federated run"):
        main(words)


def test_a_bug_in_a_class_of_ones_own_keeps_its_traceback(
    own_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="a bug in here"):
        main(["fit", "--config", RECIPE, *CPU, "--model", f"{own_module}.Broken"])


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, where Python itself doesn't look."""
    name = "classes_of_a_user"
    (tmp_path / f"{name}.py").write_text(
        "from lightning_pfl.models import DigitsCNN\n\n\n"
        "class Mine(DigitsCNN):\n"
        "    def __init__(self, twist: float = 1.0) -> None:\n"
        "        super().__init__()\n\n\n"
        "class Broken(DigitsCNN):\n"
        "    def __init__(self) -> None:\n"
        "        raise ValueError('a bug in here')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", os.curdir)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_modules_of_the_working_directory_are_found(
    own_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--model.help", f"{own_module}.Mine"])
    assert stop.value.code == 0
    assert "--model.twist" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_evaluation_without_a_checkpoint_says_so(command: str, tmp_path: Path) -> None:
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", str(tmp_path)]
    with pytest.warns(UserWarning, match=rf"`{command}` got no .* Pass --ckpt_path PATH\.ckpt"):
        PFLCLI([command, "--config", RECIPE, *CPU, *quiet])


def test_help_has_no_latex(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--method.help", "FedProx"])
    shown = capsys.readouterr().out
    assert "mu >= 0. 0 is FedAvg." in shown
    assert shown.endswith("formulas and their symbols: lightning-pfl methods show FedProx\n")
    assert ":math:" not in shown
    assert "\\" not in shown


def test_other_errors_stay_as_they_are() -> None:
    assert explain("No module named 'own'", ["model"]) == "No module named 'own'"
    assert explain("unrecognized arguments: --qqq 3", ["model"]) == (
        "unrecognized arguments: --qqq 3"
    )
    assert in_a_line(TypeError("unsupported operand")) is None
    assert nearest("qqq", ["model"]) is None


@pytest.mark.parametrize("words", [["--data.source.help", "Digits"], ["--data.source.help=Digits"]])
def test_help_of_a_part_of_the_data_needs_no_data_module(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *words])
    assert ended.value.code == 0
    assert "Help for --source.help=lightning_pfl.data.Digits" in capsys.readouterr().out


def test_help_offers_no_sources_that_only_other_commands_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--data.help", "FederatedDataModule"])
    listed = "".join(capsys.readouterr().out.split())
    assert "lightning_pfl.data.Digits" in listed
    assert "TensorFile" not in listed


def test_help_of_a_part_of_an_unnamed_method_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--method.prior.help", "GaussianPrior"])
    assert ended.value.code == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "Name it first: --method CLASS --method.prior.help GaussianPrior" in text
