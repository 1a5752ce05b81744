"""A round of a deployment beside a round of Flower's own FedAvg, on 127.0.0.1.

python -m benchmarks.deployment --rounds 6 --turns 3
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from lightning_pfl.deploy.processes import Children, free_port, program

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


def start(children: Children, name: str, command: Sequence[str], home: Path) -> None:
    """Start a program of a run, with the run's folder in its environment."""
    children.start(name, command, FLWR_HOME=str(home), PYTHONPATH=str(Path.cwd()))


def flower(folder: Path, rounds: int) -> tuple[float, float]:
    """Measure Flower's own FedAvg: wall and CPU seconds of a round."""
    times, port = folder / "times", free_port()
    with Children(folder, print) as children:
        (folder / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
            "insecure = true\n"
        )
        link = [program("flower-superlink"), "--insecure", "--port", str(port)]
        link += ["--database", str(folder / "link.db"), "--disable-runtime-dependency-installation"]
        start(children, "superlink", link, folder)
        for number in range(CLIENTS):
            node = [program("flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}"]
            node += ["--port", str(free_port())]
            node += ["--node-config", f"client={number} clients={CLIENTS}"]
            start(children, f"node-{number}", node, folder / str(number))
        wait_for(port)
        config = f"rounds={rounds} times={json.dumps(str(times))}"
        run = [program("flwr"), "run", str(APP), "--run-config", config]
        subprocess.run(run, env={**os.environ, "FLWR_HOME": str(folder)}, check=True)
        # Flower evaluates the initial model as well.
        return measure(folder, lambda: _lines(times) - 1, rounds)


def ours(folder: Path, rounds: int) -> tuple[float, float]:
    """Measure a deployment: wall and CPU seconds of a round."""
    recipe = {**RECIPE, "trainer": {**RECIPE["trainer"], "max_epochs": rounds}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    names, address = [str(client) for client in range(CLIENTS)], f"127.0.0.1:{free_port()}"
    server = {"recipe": "recipe.yaml", "nodes": names, "keys": None, "address": address}
    (folder / "server.yaml").write_text(yaml.safe_dump(server))
    command = [sys.executable, "-m", "lightning_pfl", "deploy"]
    with Children(folder, print) as children:
        config = ["--config", str(folder / "server.yaml")]
        start(children, "server", [*command, "server", *config], folder)
        for name in names:
            client = {"name": name, "recipe": "recipe.yaml", "folder": f"state-{name}"}
            path = folder / f"client-{name}.yaml"
            path.write_text(yaml.safe_dump({**client, "keys": None, "server": address}))
            start(children, name, [*command, "client", "--config", str(path)], folder)
        log = folder / "run" / "progress.log"
        return measure(folder, lambda: _lines(log, "] Round "), rounds)


def wait_for(port: int) -> None:
    """Wait until something listens on a port."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        time.sleep(0.1)


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
