"""Run all experiments, one after the other: ``python -m recipes.experiments``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def experiments() -> list[str]:
    """Names of the files here that are programs."""
    files = sorted(FOLDER.glob("[!_]*.py"))
    return [path.stem for path in files if "\nif __name__ == " in path.read_text()]


def main(arguments: list[str] | None = None) -> None:
    """Each in a process of its own; one that fails stops no other, and is named at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *experiments()], help="None: all.")
    chosen = parser.parse_args(arguments).names or experiments()
    failed = []
    for name in chosen:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", f"recipes.experiments.{name}"]
        if subprocess.run(command, check=False, cwd=FOLDER.parents[1]).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"Not finished, for the reasons above: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
