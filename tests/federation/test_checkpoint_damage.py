"""Checkpoints of another version, with changed bytes, or with numbers that can't be used."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pfl import load_clients
from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.federation.checkpoint import FORMAT, check_file, explain_read_errors
from lightning_pfl.methods import IFCA, FedRep
from lightning_pfl.methods.base import Method
from tests.trainer.setting import classes, network, trainer

Read = Callable[[Method, Path], Any]


def read_in_fit(method: Method, path: Path) -> Any:
    run = trainer(method, max_epochs=2)
    run.fit(network(), *classes(), ckpt_path=str(path))
    return run.strategy


def read_in_test(method: Method, path: Path) -> Any:
    run = trainer(method)
    run.test(network(), classes()[1], ckpt_path=str(path), verbose=False)
    return run.strategy


def read_in_load(method: Method, path: Path) -> Any:
    return load_clients(path, network(), method)


READERS = pytest.mark.parametrize("read", [read_in_fit, read_in_test, read_in_load])


def checkpoint(path: Path, method: Method | None = None) -> Path:
    run = trainer(method or FedRep(head_epochs=2), max_epochs=1)
    run.fit(network(), *classes())
    run.save_checkpoint(path)
    return path


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    return path


def rename_back(saved: dict[str, Any]) -> None:
    """Give the federated part the keys that it had before it carried a format."""
    part = saved["federated"]
    del part["format"]
    part["bank"], part["layout"] = part.pop("client_states"), part.pop("parameter_split")


@READERS
def test_a_file_of_an_earlier_version_is_refused(read: Read, tmp_path: Path) -> None:
    path = changed(checkpoint(tmp_path / "old.ckpt"), rename_back)
    with pytest.raises(CheckpointMismatchError, match="format 1, which an earlier version of"):
        read(FedRep(head_epochs=2), path)


@READERS
def test_a_file_of_a_later_version_is_refused(read: Read, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "new.ckpt")
    changed(path, lambda saved: saved["federated"].update(format=FORMAT + 1))
    with pytest.raises(CheckpointMismatchError, match=rf"format {FORMAT + 1}, which a later"):
        read(FedRep(head_epochs=2), path)


@READERS
def test_a_flipped_bit_in_any_entry_is_refused(read: Read, tmp_path: Path) -> None:
    """Where an entry's bytes lie is read from the archive, as ``torch.save`` doesn't compress."""
    path = checkpoint(tmp_path / "whole.ckpt")
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    assert len(entries) > 5
    broken = tmp_path / "broken.ckpt"
    for entry in (entries[0], entries[len(entries) // 2], entries[-1]):
        # A local header is 30 bytes, the name and an extra field, whose size its last word says.
        extra = int.from_bytes(whole[entry.header_offset + 28 : entry.header_offset + 30], "little")
        start = entry.header_offset + 30 + len(entry.filename) + extra
        damaged = bytearray(whole)
        damaged[start] ^= 1
        broken.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=f"the checksum of {entry.filename} is wrong"):
            read(FedRep(head_epochs=2), broken)
    assert read(FedRep(head_epochs=2), path).client_names == ("0", "1", "2", "3", "4")


def test_every_flipped_bit_is_refused_or_changes_no_number(tmp_path: Path) -> None:
    """Bytes between the entries hold nothing: the archive aligns entries by filling them up."""
    path = checkpoint(tmp_path / "whole.ckpt")
    whole, broken = path.read_bytes(), tmp_path / "broken.ckpt"
    want = read_in_load(FedRep(head_epochs=2), path).client_state_dict(3)
    for position in torch.randint(len(whole), (60,), generator=torch.Generator().manual_seed(0)):
        damaged = bytearray(whole)
        damaged[int(position)] ^= 4
        broken.write_bytes(damaged)
        try:
            found = read_in_load(FedRep(head_epochs=2), broken).client_state_dict(3)
        except (RuntimeError, CheckpointMismatchError):
            continue
        assert all(torch.equal(found[name], leaf) for name, leaf in want.items())


def test_a_damaged_end_of_the_archive_is_refused_or_changes_no_number(tmp_path: Path) -> None:
    """The archive's last bytes say where its entries are; a wrong place may be before the file."""
    path = checkpoint(tmp_path / "whole.ckpt")
    whole, broken, refused = path.read_bytes(), tmp_path / "broken.ckpt", 0
    want = torch.load(path, weights_only=True)["state_dict"]
    for position in range(1, 99):
        damaged = bytearray(whole)
        damaged[-position] ^= 4
        broken.write_bytes(damaged)
        try:
            with explain_read_errors(broken):
                check_file(broken)
                found = torch.load(broken, weights_only=True)["state_dict"]
        except RuntimeError:
            refused += 1
        else:
            assert all(torch.equal(found[name], leaf) for name, leaf in want.items())
    assert refused > 10


@READERS
def test_nan_on_the_server_is_refused(read: Read, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "nan.ckpt")
    name = "backbone.0.weight"
    changed(path, lambda saved: saved["federated"]["server"]["model"][name].fill_(torch.nan))
    with pytest.raises(CheckpointMismatchError, match=rf"the server's `model/{name}` holds NaN"):
        read(FedRep(head_epochs=2), path)


@READERS
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_client_state_that_is_not_finite_is_refused(
    number: float, read: Read, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "nan.ckpt")

    def change(saved: dict[str, Any]) -> None:
        saved["federated"]["client_states"]["model"]["head.bias"][3, 0] = number

    with pytest.raises(CheckpointMismatchError, match=r"`model/head\.bias` of '3' holds NaN or"):
        read(FedRep(head_epochs=2), changed(path, change))


def test_a_learning_rate_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "nan.ckpt")

    def change(saved: dict[str, Any]) -> None:
        saved["optimizer_states"][0]["param_groups"][0]["lr"] = torch.nan

    with pytest.raises(CheckpointMismatchError, match="the learning rate of SGD is nan"):
        read_in_fit(FedRep(head_epochs=2), changed(path, change))


@pytest.mark.filterwarnings("ignore:Expected more rounds than the 6")
def test_a_server_may_hold_infinity_where_the_method_says_so(tmp_path: Path) -> None:
    """IFCA's loss of a set of models that wasn't tried yet is infinite."""
    path = checkpoint(tmp_path / "ifca.ckpt", IFCA(2, restarts=1, trial_rounds=3))
    saved = torch.load(path, weights_only=True)
    assert saved["federated"]["server"]["trial_loss"].isinf().any()
    assert read_in_load(IFCA(2, restarts=1, trial_rounds=3), path).rounds == 1
