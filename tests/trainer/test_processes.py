"""Two processes end where one ends, with the same values, tables and checkpoints; and a process
that dies takes the others with it."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, distributed
from torchmetrics import MeanMetric

from lightning_pfl import FederatedStrategy, PersonalizedModule, load_clients
from lightning_pfl._lightning import notice_termination
from lightning_pfl.contract.records import Evaluation, LocalResult, LogOptions
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.ranks import Ranks, gather_evaluation, gather_work
from lightning_pfl.trainer import checks as flags
from lightning_pfl.trainer import processes
from lightning_pfl.trainer.processes import keep_metrics_apart, not_distributed
from tests.methods.cases import CASES as METHODS
from tests.trainer.run_in_processes import CASES, RESUMED, ROUNDS, ends, network, run
from tests.trainer.setting import Quadratic, points, trainer

pytestmark = [
    pytest.mark.xdist_group("processes"),  # one worker starts the runs that all of these read
    pytest.mark.filterwarnings("ignore:.*dirpath has changed from.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Clients without training samples"),
    pytest.mark.filterwarnings("ignore:Round . left out 1 of 5 clients"),
]
ROOT = Path(__file__).parents[2]
LIMIT = 150
"""Seconds after which a run counts as hanging."""


@contextmanager
def start(*args: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start the script; Lightning starts the second process. At the end, none is left."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # What a launcher may have left in this process.
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.run_in_processes"]
    with subprocess.Popen(
        [*command, *map(str, args)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that a signal reaches both processes, and no others
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Runs that go on while others run: all methods, and two in which a process raises an error."""
    path = tmp_path_factory.mktemp("started")
    with start(path, "methods") as methods, start(path, 0) as zero, start(path, 1) as one:
        yield {"folder": path, "methods": methods, "raises": [zero, one]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, started: Any) -> Path:
    """What each run knew, and the files that it wrote: in ``one`` process and in ``two``."""
    path = tmp_path_factory.mktemp("processes")
    (path / "two").mkdir()
    torch.set_num_threads(1)
    for name in CASES:
        torch.save(run(name, path / "one" / name, devices=1), path / "one" / f"{name}.pt")
    with start(path / "two", "cases") as process:
        finish(process)
    return path


@pytest.fixture(scope="module")
def methods(started: dict[str, Any]) -> Path:
    """What each process knew after all methods."""
    finish(started["methods"])
    path: Path = started["folder"]
    return path


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors.decode()[-4000:]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested containers."""
    if isinstance(value, dict):
        items = {str(key): leaf for key, leaf in value.items()}
    elif isinstance(value, (list, tuple)):
        items = {str(at): leaf for at, leaf in enumerate(value)}
    else:
        return {path: value}
    return {k: v for name, leaf in items.items() for k, v in flat(leaf, f"{path}/{name}").items()}


def assert_same(found: Any, expected: Any, exact: bool = False) -> None:
    """The same names, and numbers that differ by 1e-10 at most."""
    got, want = flat(found), flat(expected)
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, (Tensor, float)):
            assert type(got[name]) is type(value), name
            torch.testing.assert_close(
                got[name],
                value,
                rtol=0,
                atol=0 if exact else 1e-10,
                equal_nan=True,
                msg=f"{name}: got {got[name]}, expected {value}",
            )
        else:
            assert got[name] == value, name


# --- two processes are one ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_every_process_knows_what_one_process_would(name: str, rank: int, folder: Path) -> None:
    one, two = load(folder / "one" / f"{name}.pt"), load(folder / "two" / f"{name}-{rank}.pt")
    assert_same(two, one, exact=CASES[name].get("engine") == "sequential")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_with_the_same_bits(name: str, methods: Path) -> None:
    one = ends(name, devices=1)
    for rank in (0, 1):
        assert_same(load(methods / f"methods-{rank}.pt")[name], one, exact=True)


@pytest.mark.slow
def test_processes_agree_on_a_seed_that_nobody_gave(methods: Path) -> None:
    zero, one = (load(methods / f"unseeded-{rank}.pt") for rank in (0, 1))
    assert_same(one, zero, exact=True)


@pytest.mark.slow
def test_a_round_of_fedavg_has_few_messages(methods: Path) -> None:
    """What the clients logged with the gate's decisions; the range of the uploads, of floats and of
    BatchNorm's counter, and their sums; the evaluation; whether to stop."""
    expected = ["all_gather", *["all_reduce"] * 3, "all_gather", "all_gather"]
    for rank in (0, 1):
        assert load(methods / f"unseeded-{rank}.pt")["sent"] == expected


@pytest.mark.slow
def test_the_cases_are_what_they_are_meant_for(folder: Path) -> None:
    known = {name: load(folder / "one" / f"{name}.pt") for name in CASES}
    assert known["fedavg"]["rounds"] < ROUNDS  # it was stopped early
    assert known["poisoned"]["metrics"]["round/rejected"] == 1
    assert known["few"]["metrics"]["round/clients"] == 1
    assert known["local"]["seen"] == [0, 1, 2, 3, 4] * ROUNDS
    assert {"ft/val_acc", "new_clients/acc@2"} <= known["fedrep"]["metrics"].keys()
    assert [len(batches) for batches in known["fedavg"]["predictions"]] == [2, 2, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_tables_are_the_same(name: str, folder: Path) -> None:
    tables = sorted((folder / "one" / name).rglob("*.csv"))
    assert {"clients_val.csv", "metrics.csv"} <= {path.name for path in tables}
    for table in tables:
        copy = folder / "two" / table.relative_to(folder / "one")
        pair = [path.read_text().splitlines() for path in (copy, table)]
        cells = [[line.split(",") for line in lines] for lines in pair]
        assert len(cells[0]) == len(cells[1]) > 1
        if "round/seconds" in cells[0][0]:  # the time that it took
            for lines in cells:
                at = lines[0].index("round/seconds")
                for line in lines:
                    del line[at]
        got, want = ([[number(cell) for cell in line] for line in lines] for lines in cells)
        assert_same(got, want)


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "sharded"])
def test_a_checkpoint_doesnt_tell_how_many_processes_wrote_it(name: str, folder: Path) -> None:
    pair = [load(folder / many / name / "epoch=1.ckpt") for many in ("two", "one")]
    for checkpoint in pair:
        for key in [key for key in checkpoint["callbacks"] if key.startswith("ModelCheckpoint")]:
            del checkpoint["callbacks"][key]  # its paths
    assert_same(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_one_processs_checkpoint_resumes_in_two(name: str, folder: Path) -> None:
    whole = load(folder / "one" / f"{name}.pt")
    for rank in (0, 1):
        resumed = load(folder / "two" / f"{name}-resumed-{rank}.pt")
        assert resumed.pop("seen") == whole["seen"][1:]
        assert_same(resumed, {key: whole[key] for key in resumed})


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("many", ["one", "two"])
def test_a_checkpoint_of_after_the_run_has_every_clients_model(
    name: str, many: str, folder: Path
) -> None:
    clients = load_clients(
        folder / many / name / "after.ckpt", network(PersonalizedModule), CASES[name]["method"]()
    )
    models = load(folder / "one" / f"{name}.pt")["clients"]
    assert_same([clients.client_state_dict(k) for k in range(5)], models)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_checkpoint_resumes_in_one(name: str, folder: Path, tmp_path: Path) -> None:
    whole = load(folder / "one" / f"{name}.pt")
    resumed = run(name, tmp_path, 1, folder / "two" / name / "epoch=0.ckpt")
    assert resumed.pop("seen") == whole["seen"][1:]
    assert_same(resumed, {key: whole[key] for key in resumed})


# --- a process that dies --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_process_ends_the_run(rank: int, started: dict[str, Any]) -> None:
    process = started["raises"][rank]
    # stderr is at its end when both processes have closed it.
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "a bug in one process" in errors.decode()


def said(process: subprocess.Popen[bytes], text: str) -> bool:
    """Whether a process, or the one that it has started, writes a text before the limit."""
    assert process.stderr is not None
    found = b""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and text.encode() not in found:
        if select.select([process.stderr], [], [], 1)[0]:
            found += os.read(process.stderr.fileno(), 65536)
    return text.encode() in found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_named_by_the_other(rank: int, tmp_path: Path) -> None:
    with start(tmp_path, f"stops{rank}") as process:
        assert said(process, f"rank {rank} has given no sign of life for 2 seconds. It is stopped")
        if rank == 1:  # the first process ends, though the second can't
            assert process.wait(timeout=LIMIT) != 0


@pytest.mark.slow
def test_a_slow_process_is_waited_for(tmp_path: Path) -> None:
    """Four times as long as after which a process without signs of life counts as stopped."""
    with start(tmp_path, "slow") as process:
        process.communicate(timeout=LIMIT)
        assert process.returncode == 0
    first, second = (load(tmp_path / f"slow-{rank}.pt") for rank in range(2))
    assert_same(first, second, exact=True)


# --- parts ----------------------------------------------------------------------------------------


def test_one_process_is_the_trivial_case() -> None:
    ranks, tree = Ranks(), {"w": torch.rand(3, 2)}
    shard = ranks.shard(torch.tensor([5, 1, 2]))
    assert torch.tensor([5, 1, 2])[shard.index].tolist() == [5, 1, 2]
    assert shard.slice(tree) is shard.all_gather(tree) is tree
    assert ranks.all_gather_objects("known") == ["known"]
    work = LocalResult(tree, {}, {"a": torch.ones(3)}, {"a": LogOptions(True)}, torch.zeros(3))
    assert_same(vars(gather_work(shard, work)[0]), vars(work), exact=True)
    found = Evaluation({"a": torch.ones(3)}, torch.ones(3, dtype=torch.int64), {}, [[1], [], [2]])
    assert_same(vars(gather_evaluation(shard, found)[0]), vars(found), exact=True)


def test_clients_are_dealt_by_their_keys() -> None:
    keys = torch.tensor([7, 3, 2, 0, 9])
    shares = [torch.arange(5)[Ranks(rank, 3).shard(keys).index] for rank in range(3)]
    assert [share.tolist() for share in shares] == [[1, 3, 4], [0], [2]]
    ranks = Ranks(1, 3)
    with ranks.without_communication():
        assert ranks.shard(keys).index == slice(None)
    assert not ranks.alone


def test_a_bank_holds_its_own_clients_and_names_the_holder_of_others() -> None:
    client_states = ClientStateStore({"w": torch.zeros(2)}, 5, ranks=Ranks(1, 2))
    assert client_states.tree["w"].shape == (2, 2)
    client_states.scatter(torch.tensor([3]), {"w": torch.ones(1, 2)})
    assert client_states.gather(torch.tensor([3, 1]))["w"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(RuntimeError, match=r"in process 1, but that of client 4 is in process 0"):
        client_states.gather(torch.tensor([1, 4]))
    client_states.load_state_dict({"w": torch.arange(10.0).view(5, 2)})
    assert client_states.tree["w"].tolist() == [[2.0, 3.0], [6.0, 7.0]]


def test_a_bank_that_is_too_large_stays_apart() -> None:
    client_states = ClientStateStore({"w": torch.zeros(2)}, 5, ranks=Ranks(0, 2))
    client_states.gather_to_all_ranks(limit=5 * 8 - 1)
    assert not client_states.complete
    assert client_states.row_nbytes() == 8


def test_a_bank_that_has_everything_gives_up_what_isnt_its_own() -> None:
    client_states = ClientStateStore({"w": torch.zeros(2)}, 5, ranks=Ranks(1, 2))
    client_states.tree, client_states.complete = (
        {"w": torch.arange(10.0).view(5, 2)},
        True,
    )  # as after a run
    assert client_states.gather(torch.tensor([4]))["w"].tolist() == [[8.0, 9.0]]
    client_states.keep_shard()
    assert client_states.tree["w"].tolist() == [[2.0, 3.0], [6.0, 7.0]]
    assert client_states.gather(torch.tensor([3]))["w"].tolist() == [[6.0, 7.0]]


def test_a_metric_is_one_clients_while_a_run_lasts() -> None:
    module = torch.nn.ModuleList([MeanMetric(), torch.nn.Linear(1, 1)])
    before = module[0].distributed_available_fn
    undo = keep_metrics_apart(module)
    assert module[0].distributed_available_fn is not_distributed
    assert not_distributed() is False
    undo()
    assert module[0].distributed_available_fn is before


def test_a_run_leaves_metrics_as_they_were() -> None:
    module = Quadratic()
    module.metric = MeanMetric()
    before = module.metric.distributed_available_fn
    trainer(max_epochs=1).fit(module, points(), points())
    assert module.metric.distributed_available_fn is before


def test_a_termination_waits_for_the_end_of_the_round_and_is_passed_on_once() -> None:
    sent: list[int] = []
    run = trainer(max_epochs=1)
    run.strategy._launcher = SimpleNamespace(kill=sent.append)
    notice_termination(run)
    for _ in range(2):
        run._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert run.received_sigterm
    assert sent == [signal.SIGTERM]


def test_one_process_may_ask_for_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(self: Ranks, value: Any) -> list[Any]:
        return [value, (True, False)] if value == (False, False) else [value]

    monkeypatch.setattr(Ranks, "all_gather_objects", two)
    run = trainer(max_epochs=4)
    run.fit(Quadratic(), points(), points())
    assert run.current_epoch == 1


# --- what is refused ------------------------------------------------------------------------------


def test_other_clients_in_another_process_are_refused() -> None:
    names, samples = ["a", "b"], torch.tensor([3, 4])
    same = flags.digest_clients(names, samples)
    flags.check_same_clients([same, flags.digest_clients(tuple(names), samples.clone())])
    for other in (
        flags.digest_clients(["a", "c"], samples),
        flags.digest_clients(names, torch.tensor([4, 3])),
    ):
        with pytest.raises(MisconfigurationException, match="those of process 2 have other names"):
            flags.check_same_clients([same, same, other])


def shared(callbacks: list[Any], environment: Any = None) -> Any:
    strategy = SimpleNamespace(cluster_environment=environment)
    return SimpleNamespace(callbacks=callbacks, strategy=strategy, world_size=2)


@pytest.mark.parametrize("kind", [OnExceptionCheckpoint, ModelCheckpoint])
def test_saving_on_an_exception_is_refused(kind: type, tmp_path: Path) -> None:
    alone = {"save_on_exception": True} if kind is ModelCheckpoint else {}
    with pytest.raises(MisconfigurationException, match=f"can't save when {kind.__name__} asks"):
        flags.check_shared_run(shared([kind(str(tmp_path), **alone)]))
    flags.check_shared_run(shared([ModelCheckpoint(tmp_path)]))


def test_requeueing_in_the_middle_of_a_round_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Pass .*auto_requeue=False"):
        flags.check_shared_run(shared([], SLURMEnvironment(auto_requeue=True)))
    flags.check_shared_run(shared([], SLURMEnvironment(auto_requeue=False)))


# --- NCCL -----------------------------------------------------------------------------------------


def test_with_nccl_its_own_timeout_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls return before the others have come, so that nobody can look at them meanwhile."""
    made: list[dict[str, Any]] = []
    barriers: list[dict[str, Any]] = []

    def connect(environment: Any, backend: str, **settings: Any) -> None:
        made.append({"backend": backend, **settings})

    monkeypatch.setattr(processes, "connect_processes", connect)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(distributed, "barrier", lambda **given: barriers.append(given))
    environment = LightningEnvironment()
    environment.set_world_size(2)
    strategy = FederatedStrategy(
        parallel_devices=[torch.device("meta", 0), torch.device("meta", 1)],
        cluster_environment=environment,
        accelerator=CPUAccelerator(),
        process_group_backend="nccl",
        timeout=timedelta(minutes=7),
    )
    monkeypatch.setattr(strategy.accelerator, "setup_device", lambda device: None)
    strategy.setup_environment()
    assert made == [{"backend": "nccl", "timeout": timedelta(minutes=7)}]
    assert strategy.ranks.presence is None
    assert (strategy.ranks.size, strategy.ranks.device) == (2, torch.device("meta", 0))
    strategy.barrier()
    assert barriers == [{"device_ids": [0]}]
