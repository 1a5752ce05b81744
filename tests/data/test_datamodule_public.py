"""Public samples: nobody's own, and a part of everybody's training data where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl.data import IID, ClassesPerClient, FederatedDataModule
from lightning_pfl.methods import LocalOnly
from lightning_pfl.models import MLP
from lightning_pfl.testing import fit
from tests.data.test_datamodule import Numbers, features


def made(**settings: Any) -> FederatedDataModule:
    data = FederatedDataModule(
        Numbers(), ClassesPerClient(2), 8, val_fraction=0.25, **{"public_samples": 40, **settings}
    )
    data.setup()
    return data


def public(data: FederatedDataModule) -> list[float]:
    given = data.public_dataloader()
    assert given is not None
    ((found),) = features(given)
    return found


def of_all(data: FederatedDataModule) -> list[list[list[float]]]:
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    return [features(loader) for loader in loaders]


def test_public_samples_are_nobodys() -> None:
    data = made()
    shown = public(data)
    assert len(set(shown)) == 40
    held = [x for split in of_all(data) for client in split for x in client]
    assert sorted([*held, *shown]) == list(range(400))
    assert public(made()) == shown != public(made(seed=1))
    assert made(public_samples=0).public_dataloader() is None


def test_a_share_of_the_training_samples_is_public() -> None:
    """Three quarters own: a third as many public samples more, of each client's own choice."""
    plain, mixed = made(), made(own_share=0.75)
    shown = set(public(plain))
    assert set(public(mixed)) == shown
    (train, val, test), (new, new_val, new_test) = of_all(plain), of_all(mixed)
    assert (new_val, new_test) == (val, test)
    added = []
    for before, after in zip(train, new, strict=True):
        assert after[: len(before)] == before
        rest = after[len(before) :]
        assert len(rest) == len(set(rest)) == round(len(before) / 3)
        assert set(rest) <= shown
        added.append(tuple(rest))
    assert len(set(added)) == len(added)
    assert of_all(made(own_share=0.75)) == [new, new_val, new_test]
    assert mixed.settings()["own_share"] == 0.75
    assert mixed.digest() != plain.digest()


def test_more_samples_than_there_are_public_ones_are_drawn_evenly() -> None:
    plain, mixed = made(public_samples=7), made(public_samples=7, own_share=0.1)
    for before, after in zip(of_all(plain)[0], of_all(mixed)[0], strict=True):
        rest = after[len(before) :]
        assert len(rest) == 9 * len(before)
        times = [rest.count(x) for x in public(plain)]
        assert sum(times) == len(rest)
        assert max(times) - min(times) <= 1


def test_local_training_is_then_dapper() -> None:
    """Mansour et al. (2020), DAPPER: gradient descent on lambda F_k + (1 - lambda) F_C from the
    module, with C of the client's own draw; all samples in a minibatch, lambda 2/3."""
    lr, share, steps = 0.1, 2 / 3, 4
    settings: Any = {"batch_size": 1000, "public_samples": 60}
    data = FederatedDataModule(Numbers(), IID(), 4, own_share=share, **settings)
    plain = FederatedDataModule(Numbers(), IID(), 4, **settings)
    torch.manual_seed(0)
    sgd: Any = {"lr": lr, "momentum": 0.0, "weight_decay": 0.0}
    module = MLP([1, 4], num_classes=4, **sgd)
    module.double()

    def scaled(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return (batch[0].double().unsqueeze(1) / 400, batch[1])

    for each in (data, plain):
        each.setup()
    train, own = data.train_dataloader(), plain.train_dataloader()
    for loader in (train, own):
        loader.transform = scaled
    start = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    run = fit(LocalOnly(), train, module, steps)
    for client in range(4):
        count = len(own.indices[client])
        assert len(train.indices[client]) == pytest.approx(count / share, abs=0.5)
        w = {n: leaf.clone().requires_grad_() for n, leaf in start.items()}
        for _ in range(steps):
            losses = []
            for rows in (train.indices[client][:count], train.indices[client][count:]):
                x, y = scaled((rows, rows % 4))
                logits = x @ w["head.weight"].T + w["head.bias"]
                losses.append(torch.nn.functional.cross_entropy(logits, y))
            exact = count / len(train.indices[client])
            total = exact * losses[0] + (1 - exact) * losses[1]
            grads = torch.autograd.grad(total, list(w.values()))
            w = {
                n: (leaf - lr * g).detach().requires_grad_()
                for (n, leaf), g in zip(w.items(), grads, strict=True)
            }
        for name, leaf in w.items():
            torch.testing.assert_close(
                run.models[name][client], leaf.detach(), rtol=1e-8, atol=1e-10
            )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"public_samples": -1}, "`public_samples` to be a whole number >= 0, but got"),
        ({"public_samples": 1000}, "`public_samples` to be at most the 320 training samples"),
        ({"own_share": 0.0}, r"`own_share` to be in \(0, 1\], but got own_share=0.0"),
        ({"own_share": 1.5}, r"`own_share` to be in \(0, 1\], but got own_share=1.5"),
        ({"own_share": 0.5, "public_samples": 0}, "public samples for own_share=0.5, but got"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made(**settings)
