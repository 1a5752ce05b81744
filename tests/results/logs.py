"""Logs as runs write them, with values that tests choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml

Way = Literal["both", "config", "python"]


def write_run(
    folder: Path,
    method: str,
    clients: Sequence[Sequence[float]],
    seed: int = 0,
    planned: int | None = None,
    data_seed: int = 0,
    ended: bool = True,
    started_by: Way = "config",
    **arguments: object,
) -> Path:
    """Write what a run with a CSVLogger leaves.

    Args:
        folder: The run's folder.
        method: Name of its method.
        clients: A list of the clients' accuracies for each round.
        seed: Its seed.
        planned: Its planned rounds; None: as many as it has.
        data_seed: The seed of its partition.
        ended: Whether it has logged its summary.
        started_by: ``"config"``: the command line's file alone; ``"python"``: the logger's alone;
            ``"both"``: those that the command line leaves.
        **arguments: The method's arguments.
    """
    folder.mkdir(parents=True)
    rounds = len(clients)
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": planned or rounds, "logger": {"save_dir": str(folder)}},
        "data": {"class_path": "x.Data", "init_args": {"seed": data_seed, "num_clients": 3}},
        "method": {"class_path": f"lightning_pfl.methods.{method}", "init_args": arguments},
    }
    hparams = {
        "lr": 0.1,
        "method": method,
        **{f"method.{name}": value for name, value in arguments.items()},
        "data.seed": data_seed,
        "data.num_clients": 3,
        "trainer.max_epochs": planned or rounds,
        "trainer.strategy.seed": seed,
    }
    if started_by != "python":
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if started_by != "config":
        (folder / "hparams.yaml").write_text(yaml.safe_dump(hparams))
    table = ["round,client,num_samples,val_acc"]
    logs = [
        "epoch,step,round/bytes_down,round/bytes_up,val_acc,val_acc/worst_decile,last10/val_acc"
    ]
    for number, values in enumerate(clients):
        table += [f"{number},c{i},10,{value!r}" for i, value in enumerate(values)]
        mean = sum(values) / len(values)
        logs.append(f"{number},{number},,,{mean!r},{min(values)!r},")
        logs.append(f"{number},{number},1e6,2e6,,,")
    if ended:
        logs.append(f"{rounds},{rounds},,,,,0.5")
    (folder / "clients_val.csv").write_text("\n".join(table) + "\n")
    (folder / "metrics.csv").write_text("\n".join(logs) + "\n")
    return folder
