"""Probabilistic federated neural matching: one network with the units of several."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_pfl.core.checks import check_integer, check_number
from lightning_pfl.core.tree import Model
from lightning_pfl.merging.modules import require_modules
from lightning_pfl.models.units import HiddenLayer, hidden_layers
from lightning_pfl.solvers.matching import match_units


def matched(
    modules: Sequence[nn.Module],
    *,
    variance: float = 1.0,
    prior_variance: float = 1.0,
    prior_bias: float = 0.1,
    concentration: float = 1.0,
    count_weight: float = 2.0,
    sweeps: int = 50,
) -> nn.Module:
    r"""Merge networks with one hidden layer, whose units are matched, into a wider one (PFNM).

    A unit is the vector of its incoming weights, its bias and its outgoing weights. Units of
    different networks that resemble each other become one, the others are all kept: see
    :func:`~lightning_pfl.solvers.matching.match_units`. The outputs' biases are averaged. Nothing
    trains, and the networks stay as they are.

    Args:
        modules: At least one network; their hidden layers may have different widths.
        variance: Of the noise of a unit's numbers, > 0.
        prior_variance: Of the units' numbers, > 0.
        prior_bias: Prior mean of the units' biases; that of weights is 0.
        concentration: > 0; the larger, the more units the merged network has.
        count_weight: Factor of the log counts: 2 in the model, 1 in the authors' code.
        sweeps: Passes over the networks at most, >= 1.

    Returns:
        A copy of the first network with other weights, in eval mode. If it is a LightningModule,
        the sizes among its hyper-parameters are still those of the first network.

    Raises:
        ValueError: If an argument is out of its range, or a module isn't a chain of two layers
            with parameters, alike but for the width.

    Deviation from the paper: networks are assigned in their order, not in a random one.

    References:
        Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni. Bayesian nonparametric federated
        learning of neural networks. ICML 2019. arXiv:1905.12022, section 3.1.
    """
    positive = {
        "variance": variance,
        "prior_variance": prior_variance,
        "concentration": concentration,
    }
    for name, value in positive.items():
        check_number(name, value, "Use 1, as in the authors' code.", positive=True)
    check_number("count_weight", count_weight, "Use 2, as in the model.")
    check_integer("sweeps", sweeps, 1, "Use 50, for example.")
    require_modules("modules", modules)
    layers = _layers(modules)
    layer = layers[0]
    names = frozenset((*layer.rows, layer.columns))
    models = [{n: leaf.detach() for n, leaf in each.state_dict().items()} for each in modules]
    units = [
        own.vectors({n: leaf.unsqueeze(0) for n, leaf in model.items()}, names)[0]
        for own, model in zip(layers, models, strict=True)
    ]
    prior_mean = torch.cat(
        [
            torch.full((leaf[0].numel(),), prior_bias if leaf.ndim == 1 else 0.0).double()
            for leaf in (models[0][n] for n in layer.rows)
        ]
    )
    rest = units[0].shape[1] - len(prior_mean)
    atoms = match_units(
        units,
        variance=variance,
        prior_variance=prior_variance,
        prior_mean=torch.cat([prior_mean, torch.zeros(rest).double()]).to(units[0].device),
        concentration=concentration,
        count_weight=count_weight,
        sweeps=sweeps,
    )
    new = _entries(layer, atoms.means, models[0])
    others = {n for n in models[0] if n not in names}
    new |= {n: torch.stack([model[n] for model in models]).mean(0) for n in others}
    return _with(copy.deepcopy(modules[0]), new, len(atoms.means)).eval()


def _layers(modules: Sequence[nn.Module]) -> list[HiddenLayer]:
    """Return each network's hidden layer.

    Raises:
        ValueError: If there are no networks, or networks that can't be merged.
    """
    if not modules:
        raise ValueError(
            "Expected at least one network, but got modules=[]. Give the clients' own."
        )
    found = []
    for number, module in enumerate(modules):
        layers = hidden_layers(module)
        if len(layers) > 1 or len(layers[0].rows) != 2:
            kinds = f"{len(layers)} hidden layers" if len(layers) > 1 else ", ".join(layers[0].rows)
            raise ValueError(
                "Expected networks with one hidden layer of weights and biases, but network "
                f"{number} has {kinds}. Use MLP([inputs, units, outputs]), for example."
            )
        found.append(layers[0])
    first = _shapes(modules[0], found[0])
    for number, (module, layer) in enumerate(zip(modules, found, strict=True)):
        if (other := _shapes(module, layer)) != first:
            raise ValueError(
                "Expected networks that are alike but for the width of the hidden layer, but "
                f"network 0 has {first} and network {number} {other}. Use one architecture."
            )
    return found


def _shapes(module: nn.Module, layer: HiddenLayer) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's entries, without its number of units."""
    shapes = {n: tuple(leaf.shape) for n, leaf in module.state_dict().items()}
    shapes |= {n: shapes[n][1:] for n in layer.rows}
    outputs, _, *tail = shapes[layer.columns]
    return {**shapes, layer.columns: (outputs, layer.repeats, *tail)}


def _entries(layer: HiddenLayer, vectors: Tensor, like: Model) -> Model:
    """Turn units' vectors ``(units, numbers)`` into the entries of a network."""
    own = [like[n][0].numel() for n in layer.rows]
    parts = vectors.split([*own, vectors.shape[1] - sum(own)], 1)
    new = {
        n: part.reshape(-1, *like[n].shape[1:]) for n, part in zip(layer.rows, parts, strict=False)
    }
    outputs, _, *tail = like[layer.columns].shape
    outgoing = parts[-1].reshape(len(vectors), outputs, -1).movedim(0, 1)
    return {**new, layer.columns: outgoing.reshape(outputs, len(vectors) * layer.repeats, *tail)}


def _with(module: nn.Module, new: Model, units: int) -> nn.Module:
    """Put entries of other shapes into a network."""
    for name, leaf in new.items():
        place, _, attribute = name.rpartition(".")
        owner = module.get_submodule(place)
        old = getattr(owner, attribute)
        setattr(
            owner,
            attribute,
            nn.Parameter(leaf.to(old)) if name in dict(module.named_parameters()) else leaf.to(old),
        )
    for owner in module.modules():
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape
        elif isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            owner.out_channels, owner.in_channels = owner.weight.shape[:2]
    return module
