"""Checkpoints in folders: any number of processes reads one, or says which file is broken."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_pfl import FederatedStrategy, load_clients
from lightning_pfl.callbacks import BestRound
from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.core.tree import Tree
from lightning_pfl.federation import shards
from lightning_pfl.federation.checkpoint import PARTS, check_complete
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.dealing import deal_evenly
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.federation.shards import META, read_shards, write_shards
from lightning_pfl.methods import FedRep
from lightning_pfl.models import MLP
from tests.engine.nets import CLASSES, image_clients
from tests.federation.thread_ranks import everywhere
from tests.trainer.setting import trainer

CLIENTS = 7
SAMPLES = torch.tensor([3, 9, 1, 4, 4, 8, 2])


def states() -> Tree:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(CLIENTS, 2, 3, generator=generator)
    return {"head": {"w": drawn}, "steps": torch.arange(CLIENTS)}


def common(round: int) -> dict[str, Any]:
    saved = dict.fromkeys(PARTS, 0) | {"format": 2, "rounds": round, "client_states": {}}
    return {"pytorch-lightning_version": "2", "federated": saved}


def write(path: Path, size: int, round: int = 0, change: float = 0.0) -> None:
    """Write the states of all clients by so many processes."""
    owners, tree = deal_evenly(SAMPLES, size), states()

    def work(ranks: Ranks) -> None:
        ids = (owners == ranks.rank).nonzero().flatten()
        own: Tree = {"head": {"w": tree["head"]["w"][ids] + change}, "steps": tree["steps"][ids]}
        write_shards(path, common(round), {"ids": ids, "client_states": own}, ranks)

    everywhere(size, work)


@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("writers", [1, 3])
def test_any_number_of_processes_reads_what_any_number_wrote(
    writers: int, readers: int, tmp_path: Path
) -> None:
    write(tmp_path / "a.ckpt", writers, round=5)
    tree, owners = states(), deal_evenly(SAMPLES.flip(0), readers)  # not those of the writers
    for rank in range(readers):
        saved = read_shards(tmp_path / "a.ckpt")["federated"]
        assert saved["rounds"] == 5
        assert len(saved["shards"]) == writers
        check_complete(saved["shards"], CLIENTS)
        row = {"head": {"w": torch.zeros(2, 3)}, "steps": torch.tensor(0)}
        store = ClientStateStore(row, CLIENTS, ranks=Ranks(rank, readers), owners=owners)
        for part in saved["shards"]:
            store.load_state_dict(part["client_states"], part["ids"])
        mine = (owners == rank).nonzero().flatten()
        found = store.gather(mine)
        assert torch.equal(found["head"]["w"], tree["head"]["w"][mine])
        assert torch.equal(found["steps"], mine)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change a bit in the data of an entry, which a checksum covers."""
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda each: each.file_size)
    content = bytearray(path.read_bytes())
    header = content[entry.header_offset : entry.header_offset + 30]
    name, extra = struct.unpack("<HH", header[26:])
    content[entry.header_offset + 30 + name + extra + entry.file_size // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "what"),
    [(remove, "is missing"), (truncate, "has changed on the disk|truncated"), (flip, "changed")],
)
@pytest.mark.parametrize("name", ["clients-*-1-of-3.ckpt", META])
def test_a_broken_file_is_named(
    damage: Callable[[Path], None], what: str, name: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.ckpt", 3)
    (path,) = (tmp_path / "a.ckpt").glob(name)
    damage(path)
    with pytest.raises(RuntimeError, match=what) as found:
        read_shards(tmp_path / "a.ckpt")
    assert path.name in str(found.value)


def test_a_file_of_another_checkpoint_is_named(tmp_path: Path) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        write(tmp_path / name, 2)
    (ours,) = (tmp_path / "a.ckpt").glob("clients-*-1-of-2.ckpt")
    (theirs,) = (tmp_path / "b.ckpt").glob("clients-*-1-of-2.ckpt")
    theirs.replace(ours)
    with pytest.raises(RuntimeError, match=rf"{ours.name}' to be of the checkpoint in its folder"):
        read_shards(tmp_path / "a.ckpt")


def test_clients_that_are_in_no_file_are_counted() -> None:
    def part(ids: list[int], rows: int) -> dict[str, Any]:
        return {"ids": torch.tensor(ids), "client_states": {"w": torch.zeros(rows, 2)}}

    parts = [part([0, 3], 2), part([1], 1)]
    with pytest.raises(CheckpointMismatchError, match=r"states of 4 clients.*got those of 3"):
        check_complete(parts, 4)
    check_complete([*parts, part([2], 1)], 4)
    check_complete([{"ids": None, "client_states": {"w": torch.zeros(4, 2)}}], 4)
    with pytest.raises(CheckpointMismatchError, match=r"states of 1 clients.*got those of \[4\]"):
        check_complete([*parts, part([2], 4)], 4)


def test_a_process_writes_its_own_clients_also_where_it_has_gathered_all() -> None:
    owners = deal_evenly(SAMPLES, 2)

    def work(ranks: Ranks) -> tuple[Tensor, Tree, Tree]:
        store = ClientStateStore({"n": torch.tensor(0)}, CLIENTS, ranks=ranks, owners=owners)
        mine = store.own_ids()
        store.scatter(mine, {"n": 10 * mine})
        apart = store.own()
        store.gather_to_all_ranks(limit=2**20)  # as at the end of a fit
        assert len(store.tree["n"]) == CLIENTS
        return mine, apart, store.own()

    found, _ = everywhere(2, work)
    assert sorted(torch.cat([mine for mine, *_ in found]).tolist()) == list(range(CLIENTS))
    for mine, *trees in found:
        assert [tree["n"].tolist() for tree in trees] == [(10 * mine).tolist()] * 2


def test_a_checkpoint_that_could_not_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    write(path, 2, round=1)
    plain = shards._write

    def full(target: Path, content: Any) -> None:
        if target.name == META:
            raise OSError("no space left")
        plain(target, content)

    monkeypatch.setattr(shards, "_write", full)
    with pytest.raises(OSError, match="no space left"):
        write(path, 1, round=2, change=1.0)
    monkeypatch.undo()
    saved = read_shards(path)["federated"]
    assert saved["rounds"] == 1
    written = torch.cat([part["client_states"]["head"]["w"] for part in saved["shards"]])
    assert torch.equal(
        written.sum((1, 2)).sort().values, states()["head"]["w"].sum((1, 2)).sort().values
    )
    # The next one takes its place, and nothing of others is left.
    write(path, 3, round=3)
    assert read_shards(path)["federated"]["rounds"] == 3
    assert len(list(path.iterdir())) == 4


def test_a_disk_that_is_not_shared_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shards._write

    def elsewhere(target: Path, content: Any) -> None:
        if "-1-of-2" not in target.name:
            plain(target, content)

    monkeypatch.setattr(shards, "_write", elsewhere)
    with pytest.raises(
        OSError, match=r"on a disk that all 2 processes share, but 'clients-.*-1-of"
    ):
        write(tmp_path / "a.ckpt", 2)


# --- a run ----------------------------------------------------------------------------------------


def network() -> MLP:
    torch.manual_seed(0)
    return MLP([25, 6, CLASSES], num_classes=CLASSES, lr=0.1, momentum=0.9).double()


def run(rounds: int, form: str, resume: Path | None = None, **settings: Any) -> Any:
    strategy = FederatedStrategy(
        FedRep(head_epochs=1),
        participation=2,
        engine="sequential",
        seed=3,
        keep_optimizer_state=True,
        state_dict_type=form,  # type: ignore[arg-type]
    )
    made = trainer(strategy=strategy, max_epochs=rounds, **settings)
    data = image_clients((8, 4, 5), batch_size=4)
    made.fit(network(), data, data, ckpt_path=resume)
    return made


def known(made: Any) -> dict[str, Tensor]:
    clients = [made.strategy.client_state_dict(k) for k in range(3)]
    return {f"{k} {name}": leaf for k, one in enumerate(clients) for name, leaf in one.items()}


@pytest.mark.parametrize("before", ["full", "sharded"])
@pytest.mark.parametrize("after", ["full", "sharded"])
def test_a_run_goes_on_from_either_form_and_writes_the_other(
    before: str, after: str, tmp_path: Path
) -> None:
    path, expected = tmp_path / "last.ckpt", known(run(3, "full", callbacks=[BestRound()]))
    run(1, before, callbacks=[BestRound()]).save_checkpoint(path)
    assert path.is_dir() == (before == "sharded")
    made = run(3, after, path, callbacks=[BestRound()])
    for name, leaf in known(made).items():
        assert torch.equal(leaf, expected[name]), name
    made.save_checkpoint(path)  # over the one before
    assert path.is_dir() == (after == "sharded")
    clients = load_clients(path, network(), FedRep(head_epochs=1))
    for name, leaf in clients.client_state_dict(1).items():
        assert torch.equal(leaf, expected[f"1 {name}"]), name
    assert [other.name for other in tmp_path.iterdir()] == ["last.ckpt"]


class Overwriting(Callback):
    """Writes other bytes to the files of a checkpoint, once the run has read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for file in self.path.iterdir():
            with file.open("r+b") as opened:
                opened.write(bytes(file.stat().st_size))


def test_a_resumed_run_reads_nothing_of_its_checkpoint_later(tmp_path: Path) -> None:
    """Neither the server's tree nor momenta of clients that weren't drawn for long."""
    path, expected = tmp_path / "a.ckpt", known(run(4, "full"))
    run(1, "sharded").save_checkpoint(path)
    for name, leaf in known(run(4, "sharded", path, callbacks=[Overwriting(path)])).items():
        assert torch.equal(leaf, expected[name]), name


def test_a_file_in_the_place_of_its_folder_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run(1, "sharded").save_checkpoint(path)
    for file in path.iterdir():
        with pytest.raises(CheckpointMismatchError, match=r"Give the folder, '.*a\.ckpt'"):
            run(2, "sharded", file)
        with pytest.raises(CheckpointMismatchError, match=r"Give the folder, '.*a\.ckpt'"):
            load_clients(file, network(), FedRep(head_epochs=1))
    (path / META).unlink()
    with pytest.raises(
        RuntimeError, match=r"all files of the checkpoint .*'meta\.ckpt' is missing"
    ):
        run(2, "sharded", path)


def test_a_path_without_a_checkpoint_is_refused_with_what_it_can_be(tmp_path: Path) -> None:
    for path, found in ((tmp_path / "none.ckpt", "no file"), (tmp_path, "a folder")):
        with pytest.raises(FileNotFoundError, match=rf"is {found}\. Give the \.ckpt file or fold"):
            run(2, "sharded", path)


def test_model_checkpoint_keeps_the_best_folders(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_top_k=1, save_last=True)
    made = run(3, "sharded", callbacks=[saving], enable_checkpointing=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert names[1] == "last.ckpt"
    best = saving.best_model_score
    assert best is not None
    found = made.validate(network(), image_clients((8, 4, 5), batch_size=4), ckpt_path="best")
    assert found[0]["val_loss"] == pytest.approx(float(best))


def test_what_processes_can_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"no checkpoint plugin .*AsyncCheckpointIO"
    ):
        run(1, "sharded", plugins=[AsyncCheckpointIO()])
    with pytest.raises(MisconfigurationException, match=r"a path on a disk .*'memory://a'"):
        run(1, "sharded").save_checkpoint("memory://a")
    with pytest.raises(ValueError, match="Expected `state_dict_type` to be 'full' or 'sharded'"):
        run(1, "whole")
