"""The clients' models of a checkpoint file, without data and without a Trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import ClientModules, load_clients
from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.core.mixture import MixedForward
from lightning_pfl.methods import (
    APFL,
    IFCA,
    FedAvg,
    FedMAP,
    FedPer,
    FedRep,
    FedU,
    LGFedAvg,
)
from lightning_pfl.models import MLP
from lightning_pfl.testing import fit, quadratic_clients
from lightning_pfl.testing.conformance import Problem, small_clients, small_module
from tests.methods.cases import CASES, PROBLEMS
from tests.methods.split_quadratic import SplitQuadraticModule
from tests.trainer.setting import Quadratic, points, trainer


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


KINDS = ("APFL", "FedRep", "HeteroFL", "IFCA", "SCAFFOLD", "SheafFMTL")
"""A mixture, a personal head, several widths, clusters, control variates, a graph."""


def other_weights(module: Any) -> Any:
    """A module of the same kind in single precision, with weights that no run has had."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    return module.float()


@pytest.mark.parametrize(
    "name",
    [
        name if name in KINDS else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
        if name != "PerFedAvg"
    ],
)
def test_every_method_gives_the_models_of_the_run_that_wrote_the_file(
    name: str, tmp_path: Path
) -> None:
    problem = Problem(**PROBLEMS.get(name, {}))
    ran = problem.fit(CASES[name](), participation=3)
    path = ran.save(tmp_path / "last.ckpt")
    module, method = other_weights(problem.make_module(torch.float64)), CASES[name]()
    before = {key: value.clone() for key, value in module.state_dict().items()}

    clients = load_clients(path, module, method)

    assert clients.num_clients == ran.strategy.federation.num_clients
    assert clients.client_names == ran.strategy.client_names
    assert clients.rounds == 2
    assert f"({name}, {clients.num_clients} clients, after 2 rounds)" in repr(clients)
    for k, key in enumerate(clients.client_names):
        wanted = ran.strategy.client_module(k)
        assert same(clients.client_module(k).state_dict(), wanted.state_dict())
        assert same(clients.client_module(key).state_dict(), wanted.state_dict())
        if not isinstance(wanted.forward, MixedForward):
            assert same(clients.client_state_dict(k), ran.strategy.client_state_dict(k))
            assert same(clients.client_state_dict(key), ran.strategy.client_state_dict(k))
            continue
        # It predicts by several models: with the weights of that run, too.
        inputs = problem.make_data(torch.float64, False).fields[0]
        assert torch.equal(clients.client_module(k).double()(inputs), wanted(inputs))
    try:
        whole = ran.strategy.global_state_dict()
    except MisconfigurationException as cause:
        with pytest.raises(MisconfigurationException, match=re.escape(str(cause))):
            clients.global_state_dict()
    else:
        assert same(clients.global_state_dict(), whole)
    assert same(module.state_dict(), before)
    assert not hasattr(method, "known")


def test_a_model_that_needs_data_is_refused_and_the_global_one_is_there(tmp_path: Path) -> None:
    ran = Problem().fit(CASES["PerFedAvg"]())
    clients = load_clients(ran.save(tmp_path / "last.ckpt"), small_module(), CASES["PerFedAvg"]())
    assert same(clients.global_state_dict(), ran.strategy.global_state_dict())
    for ask in (clients.client_state_dict, clients.client_module):
        with pytest.raises(
            MisconfigurationException,
            match=r"got PerFedAvg, which trains them .* Use `trainer\.validate",
        ):
            ask(0)


def test_a_mixture_of_outputs_comes_back_as_a_module(tmp_path: Path) -> None:
    method = APFL(mixing=0.3, mix="outputs")
    ran = Problem().fit(method)
    clients = load_clients(
        ran.save(tmp_path / "last.ckpt"), small_module(), APFL(mixing=0.3, mix="outputs")
    )
    x = small_clients().fields[0]
    wanted = ran.strategy.client_module(2)(x)
    assert torch.equal(clients.client_module(2)(x), wanted)
    with pytest.raises(MisconfigurationException, match="mixes the outputs of two"):
        clients.client_state_dict(2)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
def test_several_architectures(tmp_path: Path) -> None:
    def modules() -> ClientModules:
        torch.manual_seed(0)
        small, large = MLP([3, 4, 2], num_classes=2), MLP([3, 5, 4, 2], num_classes=2)
        return ClientModules({"small": small, "large": large}, groups=["small", "large", "large"])

    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    loaders = [
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(part, (part[:, 0] > 0).long()), batch_size=2
        )
        for part in x.split(4)
    ]
    run = trainer(LGFedAvg(shared="head"), max_epochs=1)
    run.fit(modules(), loaders)
    run.save_checkpoint(tmp_path / "last.ckpt")
    strategy: Any = run.strategy
    clients = load_clients(tmp_path / "last.ckpt", modules(), LGFedAvg(shared="head"))
    for k in range(3):
        assert same(clients.client_state_dict(k), strategy.client_state_dict(k))
        assert torch.equal(clients.client_module(k)(x), strategy.client_module(k)(x))


class WithNotes(Quadratic):
    """Keeps something of its own in checkpoints."""

    notes = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["notes"] = "mine"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.notes = checkpoint["notes"]


def test_the_modules_own_part_of_the_checkpoint_is_given_to_it(tmp_path: Path) -> None:
    path = fit(CASES["FedAvg"](), points(), WithNotes()).save(tmp_path / "last.ckpt")
    clients = load_clients(path, WithNotes(), CASES["FedAvg"]())
    assert clients.client_module(0).notes == "mine"


# --- what doesn't fit -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fedrep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ran = Problem().fit(FedRep(head_epochs=2))
    return ran.save(tmp_path_factory.mktemp("fedrep") / "last.ckpt")


def test_a_client_that_is_not_there_is_named(fedrep: Path) -> None:
    clients = load_clients(fedrep, small_module(), FedRep(head_epochs=2))
    with pytest.raises(KeyError, match=r"an id in 0\.\.4 or one of the names '0'.*client=5"):
        clients.client_module(5)


def test_other_settings_are_said(fedrep: Path) -> None:
    with pytest.warns(UserWarning, match="The models are read with other settings of FedRep.*was"):
        load_clients(fedrep, small_module(), FedRep(head_epochs=3))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (FedPer(), "Expected a checkpoint of FedPer, but got one of FedRep"),
        (FedRep(personal="backbone.0"), "differs in .* shared .* in the checkpoint, personal"),
    ],
)
def test_another_method_or_split_is_refused(method: Any, text: str, fedrep: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=text):
        load_clients(fedrep, small_module(), method)


def test_another_module_is_refused(fedrep: Path) -> None:
    module = MLP([25, 4, 3])
    with pytest.raises(CheckpointMismatchError, match="Expected a checkpoint of this module and"):
        load_clients(fedrep, module, FedRep(head_epochs=2))


def test_another_number_of_clusters_and_another_graph_are_refused(tmp_path: Path) -> None:
    clusters = Problem().fit(IFCA(2)).save(tmp_path / "ifca.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"num_clusters=3, but got .*num_clusters=2"):
        load_clients(clusters, small_module(), IFCA(3))
    graph = Problem().fit(FedU("complete", 0.3)).save(tmp_path / "fedu.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"a run with the same `.*`"):
        load_clients(graph, small_module(), FedU("ring", 0.3))


def test_files_that_are_no_federated_checkpoint_are_refused(fedrep: Path, tmp_path: Path) -> None:
    whole = fedrep.read_bytes()
    (tmp_path / "torn.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RuntimeError, match=r"torn\.ckpt' to be a checkpoint, but it is truncated"):
        load_clients(tmp_path / "torn.ckpt", small_module(), FedRep(head_epochs=2))

    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointMismatchError, match=r"holds a dict\. Load weights"):
        load_clients(tmp_path / "weights.pt", small_module(), FedRep(head_epochs=2))

    held = {"pytorch-lightning_version": L.__version__, "state_dict": {}}
    torch.save(held, tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointMismatchError, match="got one without FederatedStrategy"):
        load_clients(tmp_path / "plain.ckpt", small_module(), FedRep(head_epochs=2))

    saved: dict[str, Any] = torch.load(fedrep, weights_only=True)
    del saved["federated"]["client_states"]
    torch.save(saved, tmp_path / "part.ckpt")
    with pytest.raises(CheckpointMismatchError, match="client_states is missing"):
        load_clients(tmp_path / "part.ckpt", small_module(), FedRep(head_epochs=2))

    with pytest.raises(FileNotFoundError, match=r"on this machine, but .* is a folder. Give the"):
        load_clients(tmp_path, small_module(), FedRep(head_epochs=2))
    with pytest.raises(FileNotFoundError, match=r"but .*none\.ckpt' is no file. Give the"):
        load_clients(tmp_path / "none.ckpt", small_module(), FedRep(head_epochs=2))


@pytest.mark.parametrize("text", [b"hello", b"not a checkpoint", b"\x80\x02q"])
def test_a_file_that_is_no_pickle_is_named(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "words.ckpt"
    path.write_bytes(text)
    with pytest.raises(RuntimeError, match=r"words\.ckpt' to be a checkpoint, but it is truncated"):
        load_clients(path, small_module(), FedRep(head_epochs=2))


def test_classes_and_swapped_arguments_are_refused(fedrep: Path) -> None:
    module, method = small_module(), FedRep(head_epochs=2)
    for wrong, name in (
        ((type(module), method), "`module` to be an instance of LightningModule"),
        ((method, module), "`module` to be an instance of LightningModule"),
        ((module, FedRep), "`method` to be an instance of Method"),
    ):
        with pytest.raises(TypeError, match=name):
            load_clients(fedrep, *wrong)


def test_code_in_the_file_does_not_run(fedrep: Path, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w').close()",)

    torch.save({**torch.load(fedrep, weights_only=True), "more": Touch()}, tmp_path / "code.ckpt")
    with pytest.raises(RuntimeError, match="would run code"):
        load_clients(tmp_path / "code.ckpt", small_module(), FedRep(head_epochs=2))
    assert not (tmp_path / "ran").exists()


def test_what_load_from_checkpoint_gives_is_the_shared_part(tmp_path: Path) -> None:
    # As docs/models.md says: the backbone is the server's, the head is that of round 0.
    start = {k: v.clone() for k, v in small_module().state_dict().items()}
    ran = Problem().fit(FedRep(head_epochs=2))
    saved = torch.load(ran.save(tmp_path / "last.ckpt"), weights_only=True)["state_dict"]
    heads: list[Tensor] = [ran.strategy.client_state_dict(k)["head.weight"] for k in range(5)]
    assert torch.equal(saved["head.weight"], start["head.weight"])
    assert not torch.equal(saved["head.weight"], heads[3])
    assert not torch.equal(saved["backbone.0.weight"], start["backbone.0.weight"])
    assert torch.equal(
        saved["backbone.0.weight"], ran.strategy.client_state_dict(3)["backbone.0.weight"]
    )


def alone(client: int) -> DataLoader[Any]:
    """The samples of a client that never took part, with the loss a/2 (v + h - c)^2."""
    data = quadratic_clients([2.0, 0.5], [3.0, -1.0], [4, 3], 2)
    samples = TensorDataset(*(field[data.indices[client]] for field in data.fields))
    return DataLoader(samples, batch_size=2)


@pytest.mark.parametrize(("client", "curvature", "center"), [(0, 2.0, 3.0), (1, 0.5, -1.0)])
def test_a_new_client_adapts_with_the_file_and_its_own_data_alone(
    client: int, curvature: float, center: float, tmp_path: Path
) -> None:
    module = SplitQuadraticModule(lr=0.1, backbone=0.5, head=-0.25)
    run = trainer(FedRep(head_epochs=2), max_epochs=2)
    old = quadratic_clients([1.0, 3.0], [0.0, 1.0], [4, 2], 2)
    run.fit(module, old, old)
    run.save_checkpoint(path := tmp_path / "last.ckpt")
    clients = load_clients(
        path, SplitQuadraticModule(lr=0.1, backbone=7.0, head=-0.25), FedRep(head_epochs=2)
    )
    before = clients.client_state_dict(0)

    adapted = clients.adapt(alone(client), epochs=3).state_dict()

    # Two minibatches in each of three epochs, each a step of h -> h - 0.1 a (v + h - c).
    v = before["backbone.weight"]
    head = (center - v) + (1 - 0.1 * curvature) ** 6 * (-0.25 - (center - v))
    torch.testing.assert_close(adapted["head.weight"], head, rtol=1e-12, atol=1e-12)
    assert torch.equal(adapted["backbone.weight"], v)
    assert same(clients.client_state_dict(0), before)
    steps = clients.adapt(alone(client), steps=1, lr=0.2).state_dict()["head.weight"]
    head = (center - v) + (1 - 0.2 * curvature) * (-0.25 - (center - v))
    torch.testing.assert_close(steps, head, rtol=1e-12, atol=1e-12)


def test_what_a_new_client_cannot_do_is_said(tmp_path: Path) -> None:
    run = trainer(max_epochs=1)
    run.fit(Quadratic(), points(), points())
    run.save_checkpoint(path := tmp_path / "last.ckpt")
    clients = load_clients(path, Quadratic(), FedAvg())
    loader = DataLoader(TensorDataset(torch.ones(3, 2).double()), batch_size=4, drop_last=True)
    with pytest.raises(MisconfigurationException, match="FedAvg shares all parameters"):
        clients.adapt(loader)
    with pytest.raises(ValueError, match=r"minibatch to train on, but got .* Use smaller batches"):
        clients.adapt(loader, scope="all")
    with pytest.raises(ValueError, match="exactly one of `epochs` and `steps`, but got"):
        clients.adapt(loader, epochs=None)


class Hooked(SplitQuadraticModule):
    """Sees each step."""

    seen: ClassVar[list[str]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append("step")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append("batch")
        return batch


class Manual(SplitQuadraticModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
@pytest.mark.parametrize("kind", [Hooked, Manual])
def test_a_new_client_of_a_module_with_code_inside_a_step(kind: Any, tmp_path: Path) -> None:
    """Two minibatches in each of three epochs, each a step of h -> h - 0.1 a (v + h - c)."""
    run = trainer(FedRep(head_epochs=2), max_epochs=2)
    old = quadratic_clients([1.0, 3.0], [0.0, 1.0], [4, 2], 2)
    run.fit(kind(lr=0.1, backbone=0.5, head=-0.25), old)
    run.save_checkpoint(path := tmp_path / "last.ckpt")
    module = kind(lr=0.1, backbone=7.0, head=-0.25)
    clients = load_clients(path, module, FedRep(head_epochs=2))
    before = clients.client_state_dict(0)
    Hooked.seen.clear()

    adapted = clients.adapt(alone(0), epochs=3)

    v = before["backbone.weight"]
    head = (3.0 - v) + (1 - 0.1 * 2.0) ** 6 * (-0.25 - (3.0 - v))
    found = adapted.state_dict()
    torch.testing.assert_close(found["head.weight"], head, rtol=1e-12, atol=1e-12)
    assert torch.equal(found["backbone.weight"], v)
    assert same(clients.client_state_dict(0), before)
    assert Hooked.seen == (["batch", "step"] * 6 if kind is Hooked else [])
    assert all(parameter.requires_grad for parameter in adapted.parameters())
    assert adapted._trainer is None
    steps = clients.adapt(alone(0), steps=1, lr=0.2).state_dict()["head.weight"]
    head = (3.0 - v) + (1 - 0.2 * 2.0) * (-0.25 - (3.0 - v))
    torch.testing.assert_close(steps, head, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
def test_steps_of_the_methods_own_refuse_a_module_with_code_inside_a_step(tmp_path: Path) -> None:
    run = trainer(FedMAP(), max_epochs=1)
    run.fit(SplitQuadraticModule(), quadratic_clients([1.0, 3.0], [0.0, 1.0], [4, 2], 2))
    run.save_checkpoint(path := tmp_path / "last.ckpt")
    with pytest.raises(MisconfigurationException, match="for FedMAP, whose new clients take steps"):
        load_clients(path, Manual(), FedMAP()).adapt(alone(0), scope="all")
