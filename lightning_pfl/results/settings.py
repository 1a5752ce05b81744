"""The settings that a run was started with: method, seeds, all that may change its results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

SETTINGS = ("config.yaml", "hparams.yaml")
"""Files of settings: that of the command line, and that of the logger."""
SEEDS = ("seed_everything", "trainer.strategy.seed")
DATA_SEED = "data.seed"
OF_RUN = ("method", "model")
#: Settings that change no result: where a run writes, what it shows, and how fast it is.
WITHOUT_EFFECT = re.compile(
    r"(ckpt_path|config|weights_only|verbose|return_predictions"
    r"|trainer\.(logger|default_root_dir|enable_|log_every|profiler|barebones|model_registry"
    r"|num_sanity|accelerator|devices|num_nodes|plugins|benchmark|limit_test|limit_predict)"
    r"|trainer\.strategy\.(engine|chunk_size|feature_cache|client_state_device|cuda_graphs|timeout"
    r"|overlap_evaluation)"
    r"|trainer\.callbacks\.(ModelCheckpoint|Timer|DeviceStatsMonitor|\w*(ProgressBar|Summary)"
    r"|LearningRateMonitor|ClientHistogram|DriftMonitor|ClientGraph|ClusterMonitor|PriorMonitor"
    r"|SubspaceDistance|PairwiseDistance|PartitionPicture|NewClientAdaptation)"
    r"|data\.eval_batch_size)(\.|$|[_a-z])"
)


@dataclass(frozen=True)
class Settings:
    """A run's settings.

    Attributes:
        method: The method's name; empty if unknown.
        seed: The seed of training, or None.
        data_seed: The seed of the partition, or None.
        rounds: The planned rounds, or None.
        values: Every other setting with an effect on results, by dotted name; classes under the
            name of their argument.
        logged: Those of the values that every run logs, whether it was started from Python or by
            the command line.
        is_complete: Whether the values are all that there are; else only those that are logged are
            known.
    """

    method: str = ""
    seed: int | None = None
    data_seed: int | None = None
    rounds: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    logged: Mapping[str, Any] = field(default_factory=dict)
    is_complete: bool = True


def read_settings(folder: Path) -> Settings:
    """Read ``config.yaml``, which the command line saves, and ``hparams.yaml`` of the logger.

    Both kinds of runs have the second, so that equal settings are equal however a run was started.
    """
    config, hparams = (_read(folder / name) for name in SETTINGS)
    if "method" not in hparams:
        return from_config(config or hparams)
    logged = from_config(
        # The module's own stand without a prefix.
        {n if "." in n or n in OF_RUN else f"model.{n}": value for n, value in hparams.items()}
    )
    if not config:
        return replace(logged, logged=logged.values, is_complete=False)
    found = from_config(config)
    values = {**found.values, **logged.values}
    return replace(found, seed=logged.seed, values=values, logged=logged.values)


def _read(path: Path) -> dict[str, Any]:
    given = yaml.load(path.read_text(), Loader=_Loader) if path.is_file() else None
    return given if isinstance(given, dict) else {}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads hyper-parameters that are Python objects as their text; in C, where PyYAML has it."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: str(node.value))


def from_config(config: Mapping[str, Any]) -> Settings:
    """Read the settings of a configuration.

    Example:
        >>> method = {"class_path": "methods.FedAvg", "init_args": {"local_epochs": 1}}
        >>> found = from_config({"seed_everything": 3, "method": method})
        >>> found.method, found.seed, found.values
        ('FedAvg', 3, {'method.local_epochs': 1})
    """
    flat = dict(_flat("", config))
    inner = flat.pop("trainer.strategy.method", None)
    method = flat.pop("method", None) or inner or ""
    for name in [name for name in flat if name.startswith("trainer.strategy.method.")]:
        flat[name.removeprefix("trainer.strategy.")] = flat.pop(name)
    seeds = [flat.pop(name, None) for name in SEEDS]
    data_seed = flat.pop(DATA_SEED, None)
    rounds = flat.get("trainer.max_epochs")
    return Settings(
        method=str(method),
        seed=next((seed for seed in reversed(seeds) if type(seed) is int), None),
        data_seed=data_seed if type(data_seed) is int else None,
        rounds=rounds if type(rounds) is int and rounds >= 0 else None,
        values={
            name: value
            for name, value in flat.items()
            if value is not None and not WITHOUT_EFFECT.match(name)
        },
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a configuration's settings by dotted name; a class is the value of its argument."""
    if isinstance(value, Mapping) and "class_path" in value:
        yield name, str(value["class_path"]).rpartition(".")[2]
        yield from _flat(name, value.get("init_args") or {})
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for each in value:
            called = str(each.get("class_path", "")).rpartition(".")[2]
            yield f"{name}.{called}", True
            yield from _flat(f"{name}.{called}", each.get("init_args") or {})
    else:
        yield name, tuple(value) if isinstance(value, list) else value
