"""Figures 4 and 5 of the FedMAP paper: its synthetic data in the plane, by t-SNE.

    python -m recipes.experiments.fedmap_tsne

One column per scenario; the same points coloured by client and by class. The features are those
before scaling, as they come from the clients' maps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lightning_pfl.data import FedMAPSynthetic
from lightning_pfl.data.sources.fedmap_synthetic import Scenario
from recipes.experiments.setting import parser
from recipes.plan import Plan

SAMPLES = 100
Points = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]

TEXT = """
**Synthetic data in the plane (FedMAP, Figures 4 and 5)**: t-SNE of {samples} samples a client, a
quarter of that for small ones; nuisance variance 9, features before scaling. The same points are
coloured by client and by class.

![t-SNE of the synthetic data](figures/fedmap_tsne.png)

As the paper says, clients mix where they have no maps and are islands where they have, smaller ones
with quantity skew; label skew shows in the colours of the islands. The class is a distance from the
origin in a subspace: without maps class 0 lies further inside, within the islands it hardly shows.
"""


def embed(scenario: Scenario, samples: int, seed: int) -> Points:
    """Points in the plane ``(n, 2)``, their clients and classes."""
    from sklearn.manifold import TSNE

    sizes = {"small_samples": samples // 4} if scenario == "quantity" else {}
    arrays = FedMAPSynthetic(
        scenario,
        samples=samples,
        nuisance_variance=9.0,
        standardize=False,
        seed=seed,
        **sizes,
    ).load()
    assert arrays.test_fields is not None
    assert arrays.test_labels is not None
    features = np.concatenate([arrays.fields[0].numpy(), arrays.test_fields[0].numpy()])
    owner = np.concatenate([arrays.columns["client"], arrays.test_columns["client"]])
    labels = np.concatenate([arrays.labels, arrays.test_labels])
    perplexity = min(30, len(features) // 4)
    points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(features)
    return points, owner, labels


def draw(found: dict[str, Points], path: Path) -> None:
    """Two rows of panels: by client and by class."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), dpi=72, layout="constrained")
    panels = figure.subplots(2, len(found))
    for column, (scenario, (points, owner, labels)) in enumerate(found.items()):
        for row, (values, colors) in enumerate(
            ((owner, "tab10"), (labels, ListedColormap(["C0", "C1"])))
        ):
            axes = panels[row, column]
            drawn = axes.scatter(
                *points.T, c=values, cmap=colors, s=5, linewidths=0, antialiased=False
            )
            axes.set(xticks=[], yticks=[])
            if column == 0:
                axes.set_ylabel(("by client", "by class")[row])
            if column == len(found) - 1:
                names = [str(v + 1 - row) for v in sorted(set(values.tolist()))]
                handles = drawn.legend_elements(num=None)[0]
                axes.legend(
                    handles, names, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
                )
        panels[0, column].set_title("IID" if scenario == "iid" else f"{scenario} skew")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, pil_kwargs={"optimize": True})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text, small = "Figures 4 and 5 of the FedMAP paper", "Eight samples a client."
    command = parser(text, small, "figures", "readme")
    command.add_argument("--seed", type=int, default=0)
    return command.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Embed, draw, and write the section."""
    options = parse(arguments)
    samples = 8 if options.small else SAMPLES
    draw(
        {scenario: embed(scenario, samples, options.seed) for scenario in get_args(Scenario)},
        options.figures / "fedmap_tsne.png",
    )
    Plan("fedmap_tsne").write_section(TEXT.format(samples=samples), options.readme)


if __name__ == "__main__":
    main()
