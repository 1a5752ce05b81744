#!/usr/bin/env bash
# Measures and tests everything that needs a GPU, in under ten minutes on one card, and writes one JSON file.
#   bash benchmarks/gpu.sh [--accelerator cpu] [FILE]
# The cells are measured in single precision, with CUDA graphs, with these and overlapped evaluations, and in mixed precision (bf16). FILE is build/gpu.json by
# default; PYTHON names the interpreter. With `--accelerator cpu` it is a trial of the script without a GPU: the tests are
# skipped, and one small cell is measured, without graphs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
ACCELERATOR=gpu
if [ "${1:-}" = --accelerator ]; then
    ACCELERATOR=${2:-}
    shift $(($# < 2 ? $# : 2))
fi
FILE=${1:-build/gpu.json}
ROUNDS=(--workloads w1 w3 w4 --methods FedAvg FedRep)
WORKERS=(-n 4)
case $ACCELERATOR in
gpu)
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
        echo "Expected a GPU that torch can use, but torch.cuda.is_available() is False. Run it on a machine with one." >&2
        exit 1
    } ;;
cpu) ROUNDS=(--workloads logistic --methods FedAvg --seconds 0) WORKERS=() ;;
*)
    echo "Expected --accelerator to be gpu or cpu, but got '$ACCELERATOR'. Leave it out for a GPU." >&2
    exit 2 ;;
esac
mkdir -p "$(dirname "$FILE")"
PARTS=$(mktemp -d)
trap 'rm -rf "$PARTS"' EXIT

# Measures cells in so many seconds at most, with the options given.
measure() {
    timeout "$1" "$PYTHON" -m benchmarks.table --parts rounds --threads 1 --no-check --accelerator "$ACCELERATOR" "${ROUNDS[@]}" "${@:2}" \
        --json "$PARTS/cells.json" || CELLS=$?
}

timeout 240 "$PYTHON" -m pytest -m gpu -q "${WORKERS[@]}" --junitxml "$PARTS/tests.xml"
TESTS=$?
CELLS=0
measure 130
if [ "$ACCELERATOR" = gpu ]; then
    measure 90 --cuda-graphs
    measure 70 --cuda-graphs --overlap-evaluation
fi
measure 50 --precision bf16-mixed
"$PYTHON" - "$PARTS" "$FILE" "$TESTS" "$CELLS" <<'PYTHON_END'
import json, sys
from pathlib import Path
from xml.etree import ElementTree

import lightning, torch

parts, file, tests, cells = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
report, table = parts / "tests.xml", parts / "cells.json"
suite = next(ElementTree.parse(report).iter("testsuite")).attrib if report.is_file() else {}
file.write_text(json.dumps({
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    "torch": torch.__version__,
    "lightning": lightning.__version__,
    "tests": {"status": tests, **{key: suite[key] for key in ("tests", "failures", "errors", "skipped", "time") if key in suite}},
    "cells": {"status": cells, "measured": list(json.loads(table.read_text())["cells"].values()) if table.is_file() else []},
}, indent=1) + "\n")
print(f"written: {file}")
PYTHON_END
exit $((TESTS || CELLS))
