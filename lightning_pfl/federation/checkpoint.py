"""Reading and checking of checkpoints."""

from __future__ import annotations

import errno
import math
import pathlib
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.core.sums import as_rows
from lightning_pfl.core.tree import Path, Tree, leaf_at, leaves, map_items, named_leaves, shapes

FORMAT = 2
"""Version of the federation's part of a checkpoint; raised when older readers can't read it."""
PARTS = (
    "method",
    "settings",
    "structure",
    "parameter_split",
    "clients",
    "num_samples",
    "seed",
    "rounds",
    "server",
    "client_states",
    "history",
)
"""Keys of the federation's part of a checkpoint."""


def check_file(path: Any) -> None:
    """Compare a local checkpoint with its checksums.

    ``torch.save`` writes a zip archive with a CRC-32 for each entry, which ``torch.load`` ignores.
    Other files and URLs aren't checked.

    Raises:
        RuntimeError: If a byte of the file has changed since it was written.
    """
    if not pathlib.Path(path).is_file():
        return
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    # OSError: a damaged offset may point before the file.
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, EOFError, RuntimeError) as cause:
        raise _damaged(path, _first_line(cause)) from cause
    if damaged is not None:
        raise _damaged(path, f"the checksum of {damaged} is wrong")


def _damaged(path: Any, what: str) -> RuntimeError:
    return RuntimeError(
        f"Expected {str(path)!r} to be a checkpoint as it was written, but it has changed on the "
        f"disk ({what}). Use another checkpoint, or copy this one again."
    )


@contextmanager
def explain_read_errors(path: Any) -> Iterator[None]:
    """Explain the errors of reading a broken or foreign file.

    Raises:
        RuntimeError: If the file is truncated, is no checkpoint, or has code that isn't run by
            default.
    """
    try:
        yield
    except pickle.UnpicklingError as cause:
        # torch's text for an object that needs code; bytes that are no pickle have another.
        if "unsupported global" not in str(cause).lower():
            raise _broken(path, cause) from cause
        raise RuntimeError(
            f"Expected the checkpoint {str(path)!r} to hold tensors and plain values, but reading "
            "it would run code. If you trust the file, pass weights_only=False."
        ) from cause
    except (RuntimeError, EOFError, ValueError, LookupError) as cause:
        raise _broken(path, cause) from cause
    except OSError as cause:
        if cause.errno != errno.EINVAL:  # a position outside a truncated file
            raise
        raise _broken(path, cause) from cause


def _broken(path: Any, cause: BaseException) -> RuntimeError:
    return RuntimeError(
        f"Expected {str(path)!r} to be a checkpoint, but it is truncated or of another format "
        f"({_first_line(cause)}). Resume from another checkpoint."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require_lightning(checkpoint: Any, path: Any) -> dict[str, Any]:
    """Return a Lightning checkpoint, or raise CheckpointMismatchError for any other object."""
    part = checkpoint.get("federated", checkpoint) if isinstance(checkpoint, dict) else None
    if isinstance(part, dict) and (isinstance(part.get("shards"), dict) or "token" in part):
        folder = pathlib.Path(path).parent
        raise CheckpointMismatchError(
            f"Expected the folder of a checkpoint with a file of each process, but got one of its "
            f"files, {str(path)!r}. Give the folder, {str(folder)!r}."
        )
    if isinstance(checkpoint, dict) and "pytorch-lightning_version" in checkpoint:
        return checkpoint
    raise CheckpointMismatchError(
        f"Expected {str(path)!r} to be a checkpoint of a Trainer, but it holds a "
        f"{type(checkpoint).__name__}. Load weights alone with "
        "`module.load_state_dict(torch.load(path))`."
    )


def federated_part(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the federation's part of a checkpoint.

    Raises:
        CheckpointMismatchError: If the run wasn't federated, the format is another one, or a part
            is missing.
    """
    if "federated" in checkpoint:
        saved: Mapping[str, Any] = checkpoint["federated"]
        _check_format(saved)
        found = saved.keys() if isinstance(saved, Mapping) else ()
        if missing := [name for name in PARTS if name not in found]:
            raise CheckpointMismatchError(
                f"Expected a checkpoint whose `federated` part has {', '.join(PARTS)}, but "
                f"{', '.join(missing)} is missing. Use an unchanged file of this version of "
                "lightning_pfl."
            )
        return saved
    raise CheckpointMismatchError(
        "Expected a checkpoint of a federated run, but got one without FederatedStrategy. Load its "
        "weights with `Module.load_from_checkpoint(path)` and call trainer.fit without ckpt_path."
    )


def _check_format(saved: Any) -> None:
    found = saved.get("format", 1) if isinstance(saved, Mapping) else FORMAT
    if found == FORMAT:
        return
    age = "an earlier" if isinstance(found, int) and found < FORMAT else "a later"
    raise CheckpointMismatchError(
        f"Expected a checkpoint in format {FORMAT}, but got one in format {found}, which {age} "
        "version of lightning_pfl wrote. Read it with that version, or start from its shared "
        "weights with `module.load_state_dict(torch.load(path)['state_dict'])`."
    )


def check_parameter_split(saved: Mapping[str, Any], method: str, ours: Mapping[str, Any]) -> None:
    """Require a checkpoint of this method, module and parameter split.

    Args:
        saved: The federation's part of the checkpoint.
        method: The method's name.
        ours: Shape and kind of every entry of the module now.

    Raises:
        CheckpointMismatchError: If one of them differs.
    """
    if saved["method"] != method:
        raise CheckpointMismatchError(
            f"Expected a checkpoint of {method}, but got one of {saved['method']}. Resume with the "
            "method that wrote it."
        )
    theirs = saved["parameter_split"]
    if theirs == ours:
        return
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    differences = "; ".join(
        f"{name}: {_entry(theirs.get(name))} in the checkpoint, {_entry(ours.get(name))} in the "
        "module"
        for name in names[:3]
    )
    raise CheckpointMismatchError(
        f"Expected a checkpoint of this module and split, but got one that differs in {len(names)} "
        f"entries ({differences}{'; ...' if len(names) > 3 else ''}). Use the module and the "
        "`personal` setting of the run that wrote it."
    )


def _entry(described: Any) -> str:
    return "missing" if described is None else f"{described[1]} {tuple(described[0])}"


def check_settings(
    saved: Mapping[str, Any],
    settings: Mapping[str, str],
    state: Sequence[str],
    doing: str = "The run continues",
) -> None:
    """Require equal settings that the server's state depends on; warn of others that changed.

    Args:
        saved: The federation's part of the checkpoint.
        settings: The method's settings now.
        state: Names of the settings that the state depends on.
        doing: Beginning of the warning.

    Raises:
        CheckpointMismatchError: If one of these differs.
    """
    theirs: Mapping[str, str] = saved["settings"]
    changed = [n for n in {**settings, **theirs} if settings.get(n) != theirs.get(n)]
    for name in state:
        if name in changed:
            raise CheckpointMismatchError(
                f"Expected a checkpoint of a run with {name}={settings.get(name)}, but got one of "
                f"a run with {name}={theirs.get(name)}. Use the `{name}` of the run that wrote it."
            )
    if changed:
        listed = "; ".join(
            f"{n} was {theirs.get(n, 'missing')}, is {settings.get(n, 'missing')}" for n in changed
        )
        rank_zero_warn(
            f"{doing} with other settings of {saved['method']} than the checkpoint's: {listed}."
        )


def saved_optimizers(checkpoint: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return class name (empty if unknown) and state of each architecture's optimizer.

    A checkpoint of weights alone has none.
    """
    states = checkpoint.get("optimizer_states") or []
    names = federated_part(checkpoint).get("optimizers") or [""] * len(states)
    return list(zip(names, states, strict=False))


def load_optimizer(
    template: Optimizer, kind: str, state: Mapping[str, Any], scheduled: bool = True
) -> None:
    """Load a checkpoint's settings into the template of the clients' optimizers.

    As in every Lightning run they replace those of ``configure_optimizers``, since schedulers may
    have changed them. Without schedulers, differences are reported.

    Args:
        template: The optimizer that ``configure_optimizers`` returned.
        kind: Name of the saved class; empty if unknown.
        state: Its ``state_dict``.
        scheduled: Whether schedulers may have changed the settings.

    Raises:
        CheckpointMismatchError: If the class or the parameter groups differ.
    """
    name, groups = type(template).__name__, state["param_groups"]
    if (kind or name, len(groups)) != (name, len(template.param_groups)):
        raise CheckpointMismatchError(
            f"Expected a checkpoint of clients that train with {name} in "
            f"{len(template.param_groups)} parameter groups, but got one of {kind or name} in "
            f"{len(groups)}. Return the optimizer of the run that wrote it."
        )
    if any(not math.isfinite(theirs.get("lr", 0.0)) for theirs in groups):
        raise _not_finite(f"the learning rate of {name} is {groups[0].get('lr')}")
    # Schedulers store the initial rate.
    keys = {"initial_lr"} if scheduled else template.defaults.keys()
    pairs = zip(template.param_groups, groups, strict=True)
    changed = [
        f"{key}={theirs[key]!r} instead of {ours[key]!r}"
        for ours, theirs in pairs
        for key in keys
        if key in ours and key in theirs and str(ours[key]) != str(theirs[key])
    ]
    if changed:
        rank_zero_warn(
            f"The run continues with the checkpoint's settings of {name}: "
            f"{', '.join(dict.fromkeys(changed))}. To change them, set them in "
            "`trainer.optimizers[0].param_groups` in `on_train_start`."
        )
    template.load_state_dict(dict(state))


def fit_server(saved: Tree, server: Tree, device: torch.device) -> Tree:
    """Convert a checkpoint's server tree to the precision of this run.

    Args:
        saved: The checkpoint's tree.
        server: The current tree.
        device: Device of the result.

    Raises:
        CheckpointMismatchError: If entries or shapes differ.
    """
    if saved.keys() != server.keys():
        raise CheckpointMismatchError(
            f"Expected a server with the entries {sorted(server)}, but the checkpoint's has "
            f"{sorted(saved)}. Use the method's settings of the run that wrote it."
        )
    theirs, ours = shapes(saved), shapes(server)
    for name in theirs.keys() & ours.keys():
        if theirs[name] != ours[name]:
            raise CheckpointMismatchError(
                f"Expected a server whose `{name}` has the shape {ours[name]}, but the "
                f"checkpoint's has {theirs[name]}. Use the method's settings of the run that "
                "wrote it."
            )

    def like(path: Path, leaf: Tensor) -> Tensor:
        ours = leaf_at(server, path)
        return leaf.to(device, None if ours is None else ours.dtype)

    return map_items(like, saved)


def check_structure(saved: Mapping[str, Any], structure: Mapping[str, Tensor], joined: int) -> None:
    """Require equal relations between clients, on which server and client states depend.

    Args:
        saved: The federation's part of the checkpoint.
        structure: The method's current ``structure``.
        joined: Number of clients that have joined; theirs are the last rows of ``structure``.

    Raises:
        CheckpointMismatchError: If they differ.
    """
    known, none = saved["structure"], torch.empty(0)
    for name in {**known, **structure}:
        theirs, ours = (held.get(name, none).cpu().double() for held in (known, structure))
        ours = ours[: len(ours) - joined]
        if theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-6, atol=0.0):
            continue
        pairs = zip_longest(theirs.tolist(), ours.tolist())
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise CheckpointMismatchError(
            f"Expected a checkpoint of a run with the same `{name}`, but got {_listed(one)} in the "
            f"checkpoint and {_listed(other)} now. Use the `{name}` of the run that wrote it."
        )


def _listed(entry: Any) -> str:
    numbers = entry if isinstance(entry, list) else [entry]
    return "nothing" if entry is None else ", ".join(f"{number:g}" for number in numbers)


def merge_clients(saved: Mapping[str, Any], names: Sequence[str], named: bool) -> tuple[str, ...]:
    """Return the clients of a run that goes on: the checkpoint's, then those that join.

    A client is who has its name. Those without data now keep their ids and their states.

    Args:
        saved: The federation's part of the checkpoint.
        names: The clients of the training data.
        named: Whether the data name them; they are otherwise known by position.

    Raises:
        CheckpointMismatchError: If they are known by position and aren't the checkpoint's, or if
            none of them is in the checkpoint.
    """
    theirs = tuple(saved["clients"])
    left, joined = (
        [name for name in ours if name not in others]
        for ours, others in ((theirs, {*names}), (names, {*theirs}))
    )
    if not named and (left or joined):
        raise CheckpointMismatchError(
            f"Expected the {len(theirs)} clients of the checkpoint ({_first(theirs)}), but got a "
            f"list of {len(names)}. Give a dict by client name, which says who joined or left."
        )
    if len(joined) == len(names):
        raise CheckpointMismatchError(
            f"Expected some of the checkpoint's clients ({_first(theirs)}), but got "
            f"{_first(names)}, none of which is in it. Use the names of the run that wrote it."
        )
    if left:
        rank_zero_info(
            f"{len(left)} clients of the checkpoint have no training data now and keep their "
            f"states: {_first(left)}."
        )
    if joined:
        rank_zero_info(f"Clients that join as new ones ({len(joined)}): {_first(joined)}.")
    return (*theirs, *joined)


def _first(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


def require_open(method: str, why_not: str, joined: Sequence[str]) -> None:
    """Require a method that clients can join.

    Args:
        method: Its name.
        why_not: Its ``fixed_clients``.
        joined: Names of the clients that join.

    Raises:
        CheckpointMismatchError: If they can't.
    """
    if why_not:
        raise CheckpointMismatchError(
            f"Expected the checkpoint's clients, as none can join a run of {method} ({why_not}), "
            f"but got {_first(joined)}. Leave them out, or start a new run."
        )


def warn_of_other_samples(saved: Mapping[str, Any], names: Sequence[str], samples: Tensor) -> None:
    """Warn if clients have other numbers of samples than in the checkpoint.

    Args:
        saved: The federation's part of the checkpoint.
        names: The clients' names now, the checkpoint's first.
        samples: Their numbers of training samples now, int64 ``(clients,)``; 0 if unknown.
    """
    held = saved["num_samples"].cpu()
    others = (held != samples[: len(held)].cpu()).nonzero().flatten()
    if samples.any() and len(others):
        client = int(others[0])
        rank_zero_warn(
            f"The run continues with other training data than the checkpoint's: {len(others)} "
            f"clients have another number of samples, such as {names[client]!r} with "
            f"{int(samples[client])} instead of {int(held[client])}."
        )


def check_client_states(saved: Tree, ours: Tree) -> None:
    """Require client states with the same entries and shapes.

    Args:
        saved: The checkpoint's client states, ``(clients, ...)``.
        ours: The current ones in this process, perhaps of some clients only.

    Raises:
        CheckpointMismatchError: If they differ.
    """
    if (held := _shapes(saved)) != (needed := _shapes(ours)):
        raise CheckpointMismatchError(
            f"Expected client states with {sorted(needed)}, but the checkpoint's have "
            f"{sorted(held)} or other shapes. Use the method's settings of the run that wrote it."
        )


def check_complete(parts: Sequence[Mapping[str, Any]], clients: int) -> None:
    """Require the states of all clients.

    Args:
        parts: What each process has written; ``ids`` has its clients, None means all, and
            ``client_states`` a row for each of them.
        clients: Number of clients.

    Raises:
        CheckpointMismatchError: If some are missing, or there twice, or rows are of other clients.
    """
    ids = [part["ids"] for part in parts if part.get("ids") is not None]
    if ids and not torch.equal(torch.cat(ids).sort().values, torch.arange(clients)):
        raise CheckpointMismatchError(
            f"Expected the states of {clients} clients, once each, in the checkpoint's "
            f"{len(parts)} files, but got those of {sum(map(len, ids))}. Copy the whole folder "
            "again, or use another checkpoint."
        )
    for part in parts:
        named = part.get("ids")
        rows = {len(leaf) for leaf in leaves(part["client_states"])}
        if named is not None and rows - {len(named)}:
            raise CheckpointMismatchError(
                f"Expected the states of {len(named)} clients in a file of the checkpoint, as it "
                f"names so many, but got those of {sorted(rows)}. Use another checkpoint."
            )


def check_finite_server(server: Tree) -> None:
    """Require a server without NaN.

    It may hold infinities: IFCA's losses of models that weren't tried yet.

    Raises:
        CheckpointMismatchError: Names the entry.
    """
    for name, leaf in named_leaves(server).items():
        if leaf.isnan().any():
            raise _not_finite(f"the server's `{name}` holds NaN")


def check_finite_states(client_states: Tree, names: Sequence[str]) -> None:
    """Require client states of finite numbers.

    Args:
        client_states: The states, ``(clients, ...)``.
        names: The clients' names.

    Raises:
        CheckpointMismatchError: Names the entry, and the client.
    """
    for name, leaf in named_leaves(client_states).items():
        bad = (~as_rows(leaf.isfinite()).all(1)).nonzero().flatten().tolist()
        if bad:
            of = f" of {names[bad[0]]!r}" if len(leaf) == len(names) else ""
            raise _not_finite(f"the client state `{name}`{of} holds NaN or infinity")


def _not_finite(what: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"Expected a checkpoint of finite numbers, but {what}. Resume from an earlier checkpoint, "
        "and train with a smaller learning rate or with gradient_clip_val."
    )


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Return one client's shapes, without the client axis."""
    return {path: shape[1:] for path, shape in shapes(tree).items()}
