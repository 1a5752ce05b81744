"""A round of a deployment beside a round of Flower's own FedAvg, on 127.0.0.1.

python -m benchmarks.deployment --rounds 6 --turns 3
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from lightning_pfl.deploy.processes import APP as DEPLOYMENT
from lightning_pfl.deploy.processes import (
    Children,
    free_port,
    run_app,
    start_superlink,
    start_supernode,
)

CLIENTS = 2
TICK = os.sysconf("SC_CLK_TCK")
APP = Path(__file__).parent / "flower_fedavg"
RECIPE: dict[str, Any] = {
    "seed_everything": 0,
    "method": {"class_path": "FedAvg"},
    "model": {"class_path": "MLP", "init_args": {"sizes": [64, 1000, 1000, 10], "lr": 0.05}},
    "data": {
        "class_path": "FederatedDataModule",
        "init_args": {
            "source": {"class_path": "Digits"},
            "partition": {"class_path": "IID"},
            "num_clients": CLIENTS,
            "batch_size": 32,
        },
    },
    "trainer": {
        "accelerator": "cpu",
        "limit_val_batches": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    },
}


def cpu_seconds(folder: Path) -> float:
    """Sum the CPU time of all processes of a run, and of those that they have waited for.

    Args:
        folder: The run's folder, which each of its processes has in its environment.
    """
    ours, ticks, mark = set(), 0, str(folder).encode()
    zombies: list[tuple[str, int]] = []  # they have no environment any more, but a parent
    for process in Path("/proc").glob("[0-9]*"):
        marked = False
        with contextlib.suppress(OSError):
            marked = mark in (process / "environ").read_bytes()
        with contextlib.suppress(OSError):
            # The name of the program, in brackets, may hold spaces.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            used = sum(map(int, fields[11:15]))
            if marked:
                ours.add(process.name)
                ticks += used
            elif fields[0] == "Z":
                zombies.append((fields[1], used))
    return (ticks + sum(used for parent, used in zombies if parent in ours)) / TICK


def measure(folder: Path, rounds: Callable[[], int], last: int) -> tuple[float, float]:
    """Wait for rounds; return wall and CPU seconds of one round, without the first."""
    marks: dict[int, tuple[float, float]] = {}
    while last not in marks:
        if (done := rounds()) in (1, last) and done not in marks:
            marks[done] = time.monotonic(), cpu_seconds(folder)
        time.sleep(0.02)
    return (
        (marks[last][0] - marks[1][0]) / (last - 1),
        (marks[last][1] - marks[1][1]) / (last - 1),
    )


@contextlib.contextmanager
def network(folder: Path, **config: str) -> Iterator[tuple[Path, int, list[Children]]]:
    """Start a SuperLink and SuperNodes; their processes end with the context.

    Yields:
        The server's folder, its port, and what the nodes start their processes with.
    """
    port = free_port()
    with ExitStack() as stack:
        children = [
            stack.enter_context(Children(folder / name, print))
            for name in ("server", *map(str, range(CLIENTS)))
        ]
        link, *nodes = children
        start_superlink(link, f"127.0.0.1:{port}", None)
        for number, node in enumerate(nodes):
            said = {name: value.format(number) for name, value in config.items()}
            start_supernode(
                node,
                node.folder,
                f"127.0.0.1:{port}",
                None,
                **said,
                client=number,
                clients=CLIENTS,
            )
        yield link.folder, port, nodes


def flower(folder: Path, rounds: int) -> tuple[float, float]:
    """Measure Flower's own FedAvg: wall and CPU seconds of a round."""
    times = folder / "times"
    with network(folder) as (home, port, _):
        run_app(home, APP, port, rounds=rounds, times=str(times))
        # Flower evaluates the initial model as well.
        return measure(folder, lambda: _lines(times) - 1, rounds)


def ours(folder: Path, rounds: int) -> tuple[float, float]:
    """Measure a deployment: wall and CPU seconds of a round."""
    recipe = {**RECIPE, "trainer": {**RECIPE["trainer"], "max_epochs": rounds}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    names = [str(client) for client in range(CLIENTS)]
    server = {"recipe": "recipe.yaml", "nodes": names, "keys": None}
    (folder / "server.yaml").write_text(yaml.safe_dump(server))
    with network(folder, socket=str(folder / "socket-{}")) as (home, port, nodes):
        for name, node in zip(names, nodes, strict=True):
            client = {"name": name, "recipe": "recipe.yaml", "folder": f"state-{name}"}
            path = folder / f"client-{name}.yaml"
            path.write_text(yaml.safe_dump({**client, "keys": None}))
            worker = [sys.executable, "-m", "lightning_pfl", "deploy", "worker"]
            worker += ["--config", str(path), "--socket", str(folder / f"socket-{name}")]
            worker += ["--finished", str(folder / f"finished-{name}")]
            node.start("worker", worker, LIGHTNING_PFL_BENCHMARK=str(folder))
        run_app(home, DEPLOYMENT, port, config=str(folder / "server.yaml"), starter=os.getpid())
        log = folder / "run" / "progress.log"
        return measure(folder, lambda: _lines(log, "] Round "), rounds)


def _lines(path: Path, mark: str = "") -> int:
    if not path.is_file():
        return 0
    return sum(mark in line for line in path.read_text().splitlines())


def main() -> None:
    """Measure both in turns, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[tuple[float, float]]] = {"Flower": [], "lightning_pfl": []}
    for turn in range(given.turns):
        for name, run in (("Flower", flower), ("lightning_pfl", ours)):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(run(Path(folder).resolve(), given.rounds))
            wall, cpu = found[name][-1]
            print(f"turn {turn}, {name}: {wall:.2f} s wall, {cpu:.2f} s CPU a round", flush=True)
    for at, what in enumerate(("wall", "CPU")):
        theirs, mine = (median(pair[at] for pair in pairs) for pairs in found.values())
        print(f"{what}: Flower {theirs:.2f} s, lightning_pfl {mine:.2f} s: {mine / theirs:.2f}")


if __name__ == "__main__":
    main()
