"""Every part composes with a recipe, and the method is still there."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback

from lightning_pfl import methods
from lightning_pfl.cli.command_line import PFLCLI
from lightning_pfl.contract.known import Known
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods.base import Method
from lightning_pfl.priors import GaussianPrior

ROOT = Path(__file__).resolve().parents[2]
PARTS = sorted((ROOT / "configs").rglob("*.yaml"))
RECIPE = ROOT / "recipes" / "fedrep_digits.yaml"


def compose(*parts: Path, extra: tuple[str, ...] = (), recipe: Path = RECIPE) -> PFLCLI:
    configs = [argument for part in (recipe, *parts) for argument in ("--config", str(part))]
    return PFLCLI([*configs, *extra, "--trainer.accelerator", "cpu"], run=False)


def callbacks_of(cli: PFLCLI) -> list[Any]:
    trainer: Any = cli.trainer
    return list(trainer.callbacks)


def methods_of(cli: PFLCLI) -> list[Method]:
    return [callback for callback in callbacks_of(cli) if isinstance(callback, Method)]


def test_there_are_parts_of_every_kind() -> None:
    assert {part.parent.name for part in PARTS} == {"data", "method", "trainer"}


@pytest.mark.sweep(18)
@pytest.mark.parametrize("part", PARTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_part_composes_and_the_method_survives(part: Path) -> None:
    cli = compose(part)
    wanted = yaml.safe_load(part.read_text()).get("method", {}).get("class_path", "FedRep")
    assert [type(method).__name__ for method in methods_of(cli)] == [wanted]
    assert len(part.read_text().splitlines()) <= 25


def test_a_part_that_adds_callbacks_keeps_those_of_the_recipe() -> None:
    cli = compose(ROOT / "configs" / "trainer" / "early_stopping.yaml")
    callbacks = {type(callback).__name__: callback for callback in callbacks_of(cli)}
    assert callbacks["EarlyStopping"].monitor == "val_acc"
    assert callbacks["ModelCheckpoint"].save_last is True


def test_a_part_that_replaces_callbacks_cannot_remove_the_method(tmp_path: Path) -> None:
    part = tmp_path / "replace.yaml"
    part.write_text("trainer:\n  callbacks:\n    - class_path: LearningRateMonitor\n")
    assert len(methods_of(compose(part))) == 1


def test_several_parts_compose_in_order() -> None:
    folder = ROOT / "configs"
    cli = compose(folder / "method" / "fedper.yaml", folder / "trainer" / "quick.yaml")
    assert type(methods_of(cli)[0]).__name__ == "FedPer"
    assert cli.trainer.max_epochs == 5


# The first run begins anew, and says so; the second finds the folder in use.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_with_the_resume_part_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the part's folder is relative
    parts = ("--config", str(RECIPE), "--config", str(ROOT / "configs/trainer/resume.yaml"))
    given = (*parts, "--ckpt_path", "last", "--method.head_epochs", "1")
    quiet = ("--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false")

    def run(rounds: int, version: str) -> tuple[list[int], str]:
        """The rounds that were trained, and the whole table."""
        number = ("--trainer.max_epochs", str(rounds), "--trainer.logger.version", version)
        trained: list[int] = []
        note = LambdaCallback(on_train_epoch_start=lambda t, _: trained.append(t.current_epoch))
        PFLCLI(["fit", *given, *quiet, *number], extra_callbacks=[note])
        return trained, (tmp_path / "logs" / version / "clients_val.csv").read_text()

    assert run(1, "run")[0] == [0]
    trained, whole = run(2, "whole")
    assert trained == [0, 1]
    assert run(2, "run") == ([1], whole)


def test_mocha_needs_a_linear_model() -> None:
    """Its part says so, and the network of a recipe is refused by name."""
    part = ROOT / "configs" / "method" / "mocha.yaml"
    assert "--model=MLP --model.sizes=[784,10]" in part.read_text()
    linear = compose(part, extra=("--model=MLP", "--model.sizes=[64,10]"))
    (method,) = methods_of(linear)
    method.bind(Known.of(ParameterSplit(linear.model), 2))
    network = compose(part)
    with pytest.raises(
        MisconfigurationException, match=r"Expected a linear model, .*Use MLP\(\[inputs, outputs\]"
    ):
        methods_of(network)[0].bind(Known.of(ParameterSplit(network.model), 2))


def test_fedmap_may_have_a_variance_for_each_layer() -> None:
    part = ROOT / "configs" / "method" / "fedmap.yaml"
    prior = "--method.prior.init_args.variance={head: 1.0, '*': 15}"
    (method,) = methods_of(compose(part, extra=(prior,)))
    assert repr(getattr(method, "prior", None)) == repr(GaussianPrior({"head": 1.0, "*": 15.0}))


NAMED = [part for part in PARTS if part.parent.name == "method"]


@pytest.mark.parametrize("part", NAMED, ids=lambda path: path.stem)
def test_a_method_under_another_name_is_in_the_table_of_names(part: Path) -> None:
    name = yaml.safe_load(part.read_text())["method"]["class_path"]
    module = getattr(methods, name).__module__.rpartition(".")[2]
    if part.stem != module:
        listed = f"`configs/method/{part.name}`"
        assert listed in (ROOT / "docs" / "choosing.md").read_text()


#: The rows of FedRep's Table 1, beside FedRep: with `+FT`, all of its fifteen.
TABLE_1 = (
    *("local", "fedavg", "fedprox", "scaffold", "fedmtl", "per_fedavg", "lg_fedavg", "l2gd"),
    *("apfl", "ditto", "fedper"),
)


@pytest.mark.parametrize(
    ("recipe", "layer", "shared"),
    [
        ("fedrep_cifar10_100_5", "backbone.9", ("backbone.9", "head")),
        ("fedrep_cifar100_100_20", "backbone.9", ("backbone.9", "head.1")),
        ("fedrep_femnist_letters", "backbone.5", ("backbone.5", "head")),
    ],
)
def test_lg_fedavg_shares_the_last_two_layers_in_table_1(
    recipe: str, layer: str, shared: tuple[str, str]
) -> None:
    cli = compose(
        ROOT / "configs" / "method" / "lg_fedavg.yaml",
        extra=(f"--method.shared=[head, {layer}]",),
        recipe=ROOT / "recipes" / f"{recipe}.yaml",
    )
    (method,) = methods_of(cli)
    personal = method.resolve_personal(ParameterSplit(cli.model))
    found = set(ParameterSplit(cli.model, personal).shared)
    assert found == {f"{name}.{part}" for name in shared for part in ("weight", "bias")}
    layers = [name.rpartition(".")[0] for name, _ in cli.model.named_parameters()]
    assert set(layers[-4:]) == set(shared)  # the last two of the network


@pytest.mark.sweep(4)
@pytest.mark.parametrize("method", TABLE_1)
def test_a_column_of_table_1_runs_every_other_method(method: str) -> None:
    """The data, the network, and the local epochs: FedRep's of the body; for local, one."""
    folder = ROOT / "configs"
    epochs = 1 if method == "local" else 5
    cli = compose(
        folder / "method" / f"{method}.yaml",
        folder / "trainer" / "head_fine_tuning.yaml",
        extra=() if method == "local" else (f"--method.local_epochs={epochs}",),
        recipe=ROOT / "recipes" / "fedrep_cifar10_1000_2.yaml",
    )
    (one,) = methods_of(cli)
    wanted = yaml.safe_load((folder / "method" / f"{method}.yaml").read_text())["method"]
    assert type(one).__name__ == wanted["class_path"]
    assert one.local_epochs == epochs
    data: Any = cli.datamodule
    assert (type(data.source).__name__, data.clients_wanted) == ("CIFAR10", 1000)
    names = {type(callback).__name__ for callback in callbacks_of(cli)}
    assert {"HeadFineTuning", "ModelCheckpoint"} <= names
