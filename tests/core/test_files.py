"""Files that are complete or not there, and folders of one run at a time."""

import os
import signal
from pathlib import Path

import pytest

from lightning_pfl.core.files import FolderLock, atomic_file


def test_the_file_replaces_the_old_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.bin"
    for text in (b"old", b"new"):
        with atomic_file(path) as file:
            file.write(text)
            assert path.exists() == (text == b"new")
        assert path.read_bytes() == text
        assert [entry.name for entry in path.parent.iterdir()] == ["state.bin"]


def test_text_takes_the_options_of_open(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "table.csv", "t", newline="\r\n") as file:
        file.write("a\nb\n")
    assert (tmp_path / "table.csv").read_bytes() == b"a\r\nb\r\n"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_file(path) as file:  # noqa: PT012
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.bin"]


def test_the_remains_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    (tmp_path / ".state.bin.tmp").write_bytes(b"a longer half of a file")
    with atomic_file(tmp_path / "state.bin") as file:
        file.write(b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.bin"]
    assert (tmp_path / "state.bin").read_bytes() == b"new"


@pytest.mark.parametrize("late", [False, True])
def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that appears after the remains were removed: then nothing is written."""
    other = tmp_path / "other.txt"
    other.write_bytes(b"not ours")
    link = tmp_path / ".state.bin.tmp"
    link.symlink_to(other)
    if late:
        monkeypatch.setattr(Path, "unlink", lambda self, missing_ok: None)
        with pytest.raises(FileExistsError), atomic_file(tmp_path / "state.bin"):
            pytest.fail("the link was opened")
    else:
        with atomic_file(tmp_path / "state.bin") as file:
            file.write(b"new")
        assert not (tmp_path / "state.bin").is_symlink()
    assert other.read_bytes() == b"not ours"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_the_file_has_the_permissions_that_the_user_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "state.bin") as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "state.bin").stat().st_mode & 0o777 == 0o640


# --- folders of one run ---

posix = pytest.mark.skipif(os.name != "posix", reason="folders aren't locked here")


@posix
def test_a_folder_has_one_owner_until_it_is_free(tmp_path: Path) -> None:
    first, second = FolderLock(), FolderLock()
    assert first.take(tmp_path / "run") == ""
    assert f"process {os.getpid()} on " in second.take(tmp_path / "run")
    assert second.take(tmp_path / "other") == ""
    first.release()
    assert second.take(tmp_path / "run") == ""
    second.release()
    assert not [*tmp_path.rglob(FolderLock.NAME)]


@posix
def test_a_process_that_was_killed_has_no_folder(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        held = FolderLock()
        held.take(tmp_path)
        os.write(tell, b".")
        signal.pause()
    os.read(ready, 1)
    assert f"process {child} on " in FolderLock().take(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock = FolderLock()
    assert (tmp_path / FolderLock.NAME).exists()
    assert lock.take(tmp_path) == ""
    lock.release()


@posix
def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / FolderLock.NAME).symlink_to(victim)
    with pytest.raises(OSError, match=f"Expected to write .*{FolderLock.NAME}"):
        FolderLock().take(tmp_path)
    assert victim.read_text() == "precious"
