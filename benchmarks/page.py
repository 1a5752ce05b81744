"""Write what ``make bench`` measured into the pages: tables and pictures.

    python -m benchmarks.page build/bench.json    also keeps it, as benchmarks/results.json, or
                                                  as results-avx2.json if the processor has AVX2
    python -m benchmarks.page                     writes what is kept

Of the second file rounds alone are written.

A table stands between ``<!-- bench: NAME begin`` and ``<!-- bench: NAME end -->``, and nobody else
writes there. Pictures are ``docs/figures/round_WORKLOAD.svg``.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.breakdown import PARTS
from benchmarks.habits import HABITS, SIZES
from benchmarks.limits import METHODS, Limit, key
from benchmarks.users import SIGMAS
from benchmarks.workloads import NETWORKS, SIX, THREE, WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "results.json"
KEPT_AVX2 = ROOT / "benchmarks" / "results-avx2.json"
PAGES = ("docs/speed.md", "docs/profiles.md", "benchmarks/README.md")
BETWEEN = re.compile(
    r"(<!-- bench: (?P<name>\w+) begin[^\n]*-->\n).*?(<!-- bench: (?P=name) end -->)", re.DOTALL
)
Found = dict[str, dict[str, Any]]
"""What was measured: for each part, by a key; see :class:`benchmarks.table.Results`. By ``avx2``
what was measured on a processor without AVX-512."""
COLORS = dict(
    zip(
        PARTS,
        ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#999999", "#dddddd"),
        strict=True,
    )
)
"""Okabe and Ito's colours, which colour-blind readers tell apart."""
WORDS = {"optimizer": "the optimizer", "aggregation": "the aggregation",
         "evaluation": "the evaluation", "rest": "what is around them"}  # fmt: skip
BESIDE = {"FedRep": "FedRep, cached"}
"""A method, and the loop's variant that is shown beside it."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a Markdown table."""
    head = list(head)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def number(ratio: float | None) -> str:
    """Write a ratio, bold where the package is slower."""
    if ratio is None:
        return ""
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


def _cells(found: Found, threads: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the cells with the default engine by workload and method."""
    return {
        (cell["workload"], cell["method"]): cell
        for cell in found.get("cells", {}).values()
        if cell["engine"] == "auto" and cell["threads"] == threads
    }


def _ratio(cell: dict[str, Any] | None, threads: int) -> float | None:
    """Return a cell's ratio: by CPU time for one thread, by the clock for several."""
    if cell is None:
        return None
    ratio: float | None = cell["cpu" if threads == 1 else "wall"]
    return ratio


def rounds(found: Found) -> str:
    """Write the ratios of whole rounds, a table for each number of threads."""
    parts = []
    for threads, title in ((1, "One thread, by CPU time"), (2, "Two threads, by the clock")):
        of = _cells(found, threads)
        names = [name for name in WORKLOADS if any(name == one for one, _ in of)]
        rows = []
        for name in names:
            row = [WORKLOADS[name].about]
            for method in SIX:
                text = number(_ratio(of.get((name, method)), threads))
                other = of.get((name, BESIDE.get(method, "")))
                row.append(f"{text}; {number(_ratio(other, threads))}" if other else text)
            rows.append(row)
        if rows:
            parts += [f"{title}:\n", table(["the loop's time over ours", *SIX], rows)]
    return "\n".join(parts)


def every_method(found: Found) -> str:
    """Write the ratio or the seconds of every method on the workloads that have all of them."""
    of = _cells(found, 1)
    measured = {name for name, _ in of}
    names = [name for name in WORKLOADS if not WORKLOADS[name].methods and name in measured]
    methods = dict.fromkeys(method for name, method in of if name in names)
    rows = []
    for method in sorted(methods, key=str.casefold):
        row = [f"`{method.split(',')[0]}`{', cached in the loop' if ',' in method else ''}"]
        for name in names:
            cell = of.get((name, method))
            row += [number(_ratio(cell, 1)), f"{1e3 * cell['cpu_seconds']:.0f}" if cell else ""]
        rows.append(row)
    head = [text for name in names for text in (WORKLOADS[name].about, "ms a round")]
    return table(["method", *head], rows) if rows else ""


def users(found: Found) -> str:
    """Write the ratios of small networks in modules of users."""
    measured = found.get("users", {})
    rows = []
    for name, sigma in product(NETWORKS, SIGMAS):
        row = [f"{NETWORKS[name][0]}{', unequal' if sigma else ''}"]
        for method in THREE:
            of = measured.get(f"{name}, {method}, {sigma}")
            row.append("" if of is None else f"{number(of['later'])}; {number(of['first'])}")
        rows.append(row)
    return table(["the loop's time over ours", *THREE], rows) if measured else ""


def habits(found: Found) -> str:
    """Write the ratios of what people write in their modules."""
    measured = found.get("habits", {})
    rows = []
    for name, habit in HABITS.items():
        row = [habit.about]
        for sigma in SIZES:
            of = measured.get(f"{name}, {sigma}")
            row.append("" if of is None else f"{number(of['later'])}; {number(of['first'])}")
        rows.append(row)
    sizes = (f"log-normal, a median of {many}" if sigma else f"{many} samples each"
             for sigma, many in SIZES.items())  # fmt: skip
    return table(["the loop's time over ours", *sizes], rows) if measured else ""


def memory(found: Found) -> str:
    """Write the memory of fits."""
    about = {
        "w3": "ResNet-18 with BatchNorm, 4 clients, 2 a round",
        "w4": "CNN of 1.6 million, 100 clients, 20 a round",
        "w4-1000": "the same, 1,000 clients, 50 a round",
        "many": "logistic regression, 100,000 clients, 10 a round",
        "logistic": "logistic regression, 1,000 clients, 100 a round",
    }
    rows = [
        [
            f"{about[row['workload']]}, {row['method']}",
            f"{row['rounds']:,}",
            *(f"{row[key]:.0f}" for key in ("peak", "needed")),
            f"{row['ratio']:.2f}",
            *(f"{row[key]:.0f}" for key in ("first_quarter", "end")),
        ]
        for row in found.get("memory", {}).values()
    ]
    head = ["MiB", "rounds", "peak", "tensors", "ratio", "after a quarter", "at the end"]
    return table(head, rows) if rows else ""


def start(found: Found) -> str:
    """Write the time to begin, and what a round has beside its work."""
    rows = []
    if "start" in found:
        of = found["start"]["start"]
        rows += [
            [f"`import {name}`", f"{of[f'import {name}']:.2f} s"]
            for name in ("lightning", "lightning_pfl")
        ]
        rows += [
            ["FedRep on the digits: from `fit` to the end of its first round",
             f"{of['to_first']:.2f} s"],
            ["its first round, with the probe of the engines", f"{of['first']:.2f} s"],
            ["a later one", f"{of['later']:.2f} s"],
        ]  # fmt: skip
    rows += [
        [f"a round beside training and evaluation, logger {name}", f"{took:.1f} ms"]
        for name, took in found.get("overhead", {}).items()
    ]
    return table(["CPU time", ""], rows) if rows else ""


def two_processes(found: Found) -> str:
    """Write what two processes gain."""
    about = {
        "w1": "LeNet, batch 10, 100 clients, 10 a round",
        "w2": "MLP 784-200-200-10, batch 50, 100 clients, 10 a round",
        "w4": "CNN of 1.6 million, 200 clients, 50 a round",
    }
    rows = [
        [
            about[key.split(",")[0]],
            *(f"{row[ratio]:.2f}" for ratio in ("wall", "cpu")),
            f"{row['one']:.3f}, {row['several']:.3f}",
            f"{100 * row['waits']:.0f} %",
            f"{row['best']:.2f}",
        ]
        for key, row in found.get("processes", {}).items()
    ]
    head = ["FedAvg", "by the clock", "by CPU time", "seconds a round, one and two",
            "in collective calls", "at best"]  # fmt: skip
    return table(head, rows) if rows else ""


def frameworks(found: Found) -> str:
    """Write the comparison with other frameworks."""
    rows = [
        [
            row["peer"],
            row["method"],
            str(row["threads"]),
            f"{row['cpu' if row['threads'] == 1 else 'wall']:.2f}",
            *(f"{row[key]:.3f}" for key in ("peer_seconds", "seconds")),
            str(row["rounds"]),
        ]
        for row in found.get("peers", {}).values()
    ]
    head = ["", "method", "threads", "its time over ours", "its seconds a round", "ours",
            "medians of"]  # fmt: skip
    return table(head, rows) if rows else ""


def parts(found: Found) -> str:
    """Write the parts of a round, and how far they are from the limit of arithmetic."""
    rows = []
    for name, row in found.get("profile", {}).items():
        milliseconds = {
            side: {part: 1e3 * took for part, took in row[side].items()}
            for side in ("ours", "theirs")
        }
        own = milliseconds["ours"]
        whole = sum(own.values()), sum(milliseconds["theirs"].values())
        alone = found.get("limits", {}).get(name)
        alone = None if alone is None else Limit(**alone)
        rows.append(
            [
                WORKLOADS[name].about,
                *(_short(one) for one in whole),
                _short(sum(own[part] for part in PARTS[:5])),
                _short(own["products"]),
                "" if alone is None else _short(1e3 * alone.steps * alone.products),
                _short(1e3 * row["operations"] / row["peak"]),
                f"{whole[1] / whole[0]:.2f}",
                "" if alone is None else f"{alone.of_round:.2f}",
            ]
        )
    head = ["milliseconds", "round", "the loop's", "training", "its products", "one by one",
            "at the peak", "the loop over ours", "at best"]  # fmt: skip
    return table(head, rows) if rows else ""


def limits(found: Found) -> str:
    """Write the best ratios of whole rounds that are left to reach by each method."""
    measured = found.get("limits", {})
    rows = []
    for name in WORKLOADS:
        best = [measured.get(key(name, method)) for method in METHODS]
        if sum(one is not None for one in best) > 1:  # FedAvg's is among the parts of a round
            rows.append(
                [
                    WORKLOADS[name].about,
                    *("" if one is None else f"{Limit(**one).of_round:.2f}" for one in best),
                ]
            )
    return table(["at best, one thread", *METHODS], rows) if rows else ""


def pictures(found: Found) -> str:
    """Write a sentence on each workload's round, and link its picture."""
    lines = []
    for name, row in found.get("profile", {}).items():
        own, other = row["ours"], sum(row["theirs"].values())
        whole = sum(own.values())
        first = sorted(PARTS, key=lambda part: -own[part])[:3]
        shares = [f"{100 * own[part] / whole:.0f} % are {WORDS.get(part, part)}" for part in first]
        about = WORKLOADS[name].about
        begin = about[0].upper() + about[1:]
        lines.append(
            f"{begin}: of {_short(1e3 * whole)} ms a round, {shares[0]}, {shares[1]} and "
            f"{shares[2]}; the loop takes {other / whole:.2f} times as long.\n\n"
            f"![Parts of a round: {about}]({picture(name)})\n"
        )
    return "\n".join(lines)


def picture(name: str) -> str:
    """Return a picture's path beside the page."""
    return f"figures/round_{name}.svg"


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"


def machine(found: Found) -> str:
    """Write where it was measured."""
    of = found.get("machine", {}).get("machine")
    if of is None:
        return ""
    return (
        f"Measured with torch {of['torch']}, Lightning {of['lightning']} and Python "
        f"{of['python']} on {of['cores']} cores of {of['device']} with {of['instructions']}; load "
        f"before it began: {of['load']}.\n"
    )


def without_avx512(found: Found) -> str:
    """Write where rounds on a processor without AVX-512 were measured, and their ratios."""
    other = found.get("avx2", {})
    return f"{machine(other)}\n{rounds(other)}" if other else ""


def read_kept() -> Found:
    """Read all that is kept."""
    found: Found = json.loads(KEPT.read_text())
    return found | ({"avx2": json.loads(KEPT_AVX2.read_text())} if KEPT_AVX2.is_file() else {})


TABLES: dict[str, Callable[[Found], str]] = {
    "machine": machine,
    "rounds": rounds,
    "users": users,
    "habits": habits,
    "methods": every_method,
    "parts": parts,
    "limits": limits,
    "pictures": pictures,
    "memory": memory,
    "start": start,
    "processes": two_processes,
    "peers": frameworks,
    "avx2": without_avx512,
}


def write_tables(text: str, found: Found) -> str:
    """Return a page with the tables of what was measured."""
    return BETWEEN.sub(lambda one: one[1] + TABLES[one["name"]](found) + one[3], text)


def draw(name: str, row: dict[str, Any], path: Path) -> None:
    """Draw the parts of a round as two bars: the package's and the plain loop's."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    # The same bytes for the same numbers; letters stay letters.
    with pyplot.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(7.5, 1.9), layout="constrained")
        for place, (side, label) in enumerate((("ours", "this package"), ("theirs", "plain loop"))):
            left, whole = 0.0, sum(row[side].values())
            for part in PARTS:
                width = 1e3 * row[side][part]
                bar = axes.barh(place, width, left=left, color=COLORS[part], label=part)
                if width > 0.05 * 1e3 * max(sum(row[s].values()) for s in ("ours", "theirs")):
                    ink = "white" if part == PARTS[0] else "black"
                    inside = [_short(width)]
                    axes.bar_label(bar, inside, label_type="center", fontsize=8, color=ink)
                left += width
            text = f"{label}: {_short(1e3 * whole)}"
            axes.annotate(text, (left, place), (4, 0), textcoords="offset points", va="center")
        limit = 1e3 * row["operations"] / row["peak"]
        axes.axvline(limit, color="black", linestyle=":", linewidth=1.2, label="limit")
        axes.set_title(f"{WORKLOADS[name].about}, FedAvg: CPU milliseconds of a round", loc="left")
        axes.set_yticks([])
        axes.set_ylim(1.5, -0.5)
        axes.set_xlim(0, 1.25 * 1e3 * max(sum(row[s].values()) for s in ("ours", "theirs")))
        axes.spines[["top", "right", "left"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        shown = dict(zip(labels, handles, strict=True))
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown),
                      frameon=False, handlelength=1, columnspacing=0.9, handletextpad=0.4,
                      fontsize=8)  # fmt: skip
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def main(arguments: Iterable[str] | None = None) -> None:
    """Keep what was measured, and write the pages and the pictures."""
    parser = argparse.ArgumentParser(description="Write tables and pictures of measurements.")
    parser.add_argument("file", nargs="?", type=Path, help="what `make bench` wrote")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.file is not None:
        text = options.file.read_text()
        of = json.loads(text).get("machine", {}).get("machine", {})
        (KEPT_AVX2 if of.get("instructions") == "AVX2" else KEPT).write_text(text)
    found = read_kept()
    for page in PAGES:
        path = ROOT / page
        path.write_text(write_tables(path.read_text(), found))
    for name, row in found.get("profile", {}).items():
        draw(name, row, ROOT / "docs" / picture(name))


if __name__ == "__main__":
    main()
