"""The command line, through the front door."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_pfl import FederatedStrategy
from lightning_pfl.cli.command_line import PFLCLI, main
from lightning_pfl.cli.results import print_results, summary_rows
from lightning_pfl.methods import FedRep

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "fedrep_digits.yaml")
CPU = ["--trainer.accelerator", "cpu"]
UNTRAINED = pytest.mark.filterwarnings("ignore:.* got no checkpoint")


def build(*arguments: str) -> PFLCLI:
    return PFLCLI(["--config", RECIPE, *CPU, *arguments], run=False)


def strategy_of(cli: PFLCLI) -> FederatedStrategy:
    assert isinstance(cli.trainer.strategy, FederatedStrategy)
    return cli.trainer.strategy


def method_of(cli: PFLCLI) -> FedRep:
    trainer: Any = cli.trainer
    return next(callback for callback in trainer.callbacks if isinstance(callback, FedRep))


def test_short_class_names_and_overrides_on_the_command_line() -> None:
    cli = build("--method.head_epochs", "4", "--trainer.strategy.engine", "sequential")
    assert method_of(cli).head_epochs == 4
    assert cli.config.trainer.strategy.init_args.engine == "sequential"


@pytest.mark.parametrize(("text", "value"), [("10", 10), ("1", 1), ("0.1", 0.1), ("1.0", 1.0)])
def test_participation_is_a_count_without_a_point_and_a_fraction_with_one(
    text: str, value: float
) -> None:
    participation = strategy_of(build("--trainer.strategy.participation", text)).participation
    assert participation == value
    assert type(participation) is type(value)


def test_the_federated_strategy_is_the_default() -> None:
    arguments = ["--method", "FedRep", "--model", "DigitsCNN", *CPU]
    cli = PFLCLI(arguments, run=False)
    assert strategy_of(cli).participation == 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--method.head_epoch", "4"], "head_epoch"),
        (["--method.head_epochs", "-4"], "Expected `head_epochs` to be"),
        (["--method", "FedRap"], "FedRap"),
        (["--model.leraning_rate", "4"], "leraning_rate"),
        (["--data.init_args.batchsize", "4"], "batchsize"),
        (["--trainer.strategy.participaton", "4"], "participaton"),
        (["--trainer.max_epoch", "4"], "max_epoch"),
        (["--trainer.strategy.participation", "-0.5"], "Expected `participation` to be"),
    ],
)
def test_what_is_misspelt_or_out_of_range_is_refused_by_name(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        build(*wrong)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--model", "DigitsCNN"])
    assert "method" in capsys.readouterr().err


def test_data_that_cannot_be_downloaded_are_an_error_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", offline)
    recipe = Path(RECIPE).with_name("fedrep_cifar10_100_5.yaml")
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(recipe), *CPU, f"--data.source.data_dir={tmp_path}"])
    text = str(stopped.value.code)  # the interpreter prints it, and exits with status 1
    assert text.startswith("error: Expected the files of CIFAR10 as torchvision lays them out")
    assert f"{tmp_path}; torchvision (no route to host). Install torchvision and run once" in text


def test_other_files_that_are_missing_keep_their_traceback() -> None:
    with pytest.raises(FileNotFoundError, match="nope"):
        main(["test", "--config", RECIPE, *CPU, "--ckpt_path", "nope.ckpt"])


def test_print_config_shows_every_resolved_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", RECIPE, "--print_config"])
    assert stop.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["method"]["init_args"]["body_epochs"] == 1
    assert shown["trainer"]["strategy"]["init_args"]["engine"] == "auto"
    assert "method" not in shown["trainer"]["strategy"]["init_args"]  # it is above


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_every_subcommand(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "--method" in capsys.readouterr().out


def test_help_of_a_method_is_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--method.help", "FedRep"])
    assert "--method.head_epochs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_module_is_the_console_script() -> None:
    command = [sys.executable, "-m", "lightning_pfl", "--help"]
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert "{fit,validate,test,predict}" in result.stdout


# The second run has a log folder of its own, and says so.
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_fit_then_test_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--config", RECIPE, *CPU, "--trainer.default_root_dir", str(tmp_path)]
    quiet = ["--trainer.enable_progress_bar", "false"]
    fitted = PFLCLI(
        ["fit", *common, *quiet, "--trainer.max_epochs", "1", "--method.head_epochs", "1"]
    )
    assert "After training" in capsys.readouterr().out
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    tested = PFLCLI(
        ["test", *common, *quiet, "--ckpt_path", str(checkpoint), "--method.head_epochs", "1"]
    )
    first = fitted.trainer.test(fitted.model, datamodule=fitted.datamodule, verbose=False)
    assert float(tested.trainer.callback_metrics["test_acc"]) == first[0]["test_acc"]


@UNTRAINED
def test_predict_writes_what_every_client_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--config", RECIPE, *CPU, "--trainer.default_root_dir", str(tmp_path)]
    cli = PFLCLI(["predict", *settings, "--trainer.enable_progress_bar", "false"])
    (path,) = tmp_path.rglob("predictions.pt")
    assert str(path) in capsys.readouterr().out
    written = torch.load(path, weights_only=True)
    data = cli.datamodule.predict_dataloader()
    assert list(written) == list(data.names)
    cli.model.eval()  # nothing was trained: every client's model is the module
    with torch.no_grad():
        for client, outputs in enumerate(written.values()):
            x = data.gather(data.indices[client])[0]
            torch.testing.assert_close(torch.cat(outputs), cli.model(x))


def test_evaluated_picks_what_has_a_worst_decile() -> None:
    logged = {
        "val_acc": 0.9,
        "val_acc/weighted": 0.8,
        "val_acc/worst_decile": 0.5,
        "val_acc/worst": 0.25,
        "train_loss": 1.0,
    }
    picked = summary_rows(logged)
    assert list(picked) == ["val_acc"]
    assert picked["val_acc"] == {"mean": 0.9, "weighted": 0.8, "worst_decile": 0.5, "worst": 0.25}


def test_the_table_after_fit_names_model_and_statistics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"ft/val_acc": 0.75, "ft/val_acc/worst_decile": 0.5}
    print_results(values)
    shown = capsys.readouterr().out
    assert "ft/val_acc" in shown
    assert "0.7500" in shown
    assert "0.5000" in shown
    assert "standard error" not in shown
    assert "nan" not in shown
    print_results({**values, "ft/val_acc/standard_error": 0.0625})
    assert "0.0625" in capsys.readouterr().out


def test_the_table_after_fit_has_whole_words_on_a_narrow_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    statistics = ("weighted", "std", "worst_decile", "worst", "standard_error")
    name = "best/val_loss"
    print_results({name: 0.5} | {f"{name}/{statistic}": 0.25 for statistic in statistics})
    shown = capsys.readouterr().out.split()
    assert {name, "weighted", "decile", "standard", "error"} <= set(shown)


@UNTRAINED
def test_validate_ends_with_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", str(tmp_path)]
    PFLCLI(["validate", "--config", RECIPE, *CPU, *quiet])
    shown = capsys.readouterr().out
    assert "worst decile" in shown.partition("After the validation")[2]


def test_there_is_no_table_without_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    print_results({"train_loss": 1.0})
    assert capsys.readouterr().out == ""


def test_the_clusters_stand_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"val_acc": 0.75, "val_acc/worst_decile": 0.5}
    print_results({**values, "clusters/number": 3.0, "clusters/ari": 0.8125, "drift/norm": 1.0})
    shown = " ".join(capsys.readouterr().out.split())
    assert "clusters/number 3, clusters/ari 0.8125" in shown
    assert "drift" not in shown
