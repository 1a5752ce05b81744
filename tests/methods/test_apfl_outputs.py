"""APFL with mixed outputs: alpha f_v(x) + (1 - alpha) f_w(x), in training and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from lightning_pfl.callbacks import NewClientAdaptation
from lightning_pfl.core.mixture import (
    OTHER,
    SHARE,
    Mix,
    mixture,
    parts,
)
from lightning_pfl.methods import APFL, FedAvg, LocalOnly
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    fit,
    local_round,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.networks import SCALARS, cohorts, linear_module, plain_module
from tests.methods.quadratics import close, ragged
from tests.methods.references.apfl import gradient
from tests.methods.references.training import State, average, batches, with_data

OUTPUTS: Any = {"mix": "outputs"}


def reference(
    data: Any, in_rounds: list[Tensor], mixing: float, adaptive: bool, lr: float
) -> tuple[State, list[State], list[Tensor]]:
    """The global model, own models and mixing weights; the mixture is left to autograd."""
    module = plain_module()
    server: State = module.state_dict()
    client_state = [dict(server) for _ in range(data.num_clients)]
    alphas = [torch.tensor(mixing, dtype=torch.float64) for _ in client_state]
    for t, cohort in enumerate(in_rounds):
        sent = []
        for k in (k for k in with_data(data) if k in cohort.tolist()):
            w, v = dict(server), client_state[k]
            for number, (x, y) in enumerate(batches(data, k, t, 1)):
                g = gradient(module, w, (x, y))
                w = {n: w[n] - lr * g[n] for n in w}
                live = {n: leaf.clone().requires_grad_() for n, leaf in v.items()}
                alpha = alphas[k].clone().requires_grad_()
                both = alpha * functional_call(module, live, (x,))
                both = both + (1 - alpha) * functional_call(module, w, (x,))
                F.cross_entropy(both, y).backward()
                v = {n: (p - lr * p.grad).detach() for n, p in live.items() if p.grad is not None}
                if adaptive and number == 0:
                    assert alpha.grad is not None
                    alphas[k] = (alphas[k] - lr * alpha.grad).clamp(0, 1)
            client_state[k] = v
            sent.append(w)
        server = average(sent, [1.0] * len(sent))
    return server, client_state, alphas


class TestMixedOutputs:
    @pytest.mark.parametrize("adaptive", [False, True])
    def test_matches_the_reference(self, engine: str, adaptive: bool) -> None:
        data = small_clients()
        method = APFL(0.4, adaptive, **OUTPUTS)
        run = fit(method, data, plain_module(0.3), 3, engine, participation=3)
        server, client_state, alphas = reference(data, cohorts(3, 3), 0.4, adaptive, 0.3)
        assert_trees_close(run.server["model"], server)
        assert_trees_close(
            run.client_state["personal"],
            {n: torch.stack([o[n] for o in client_state]) for n in server},
        )
        if adaptive:
            close(run.client_state["mixing"], torch.stack(alphas))
            assert float(run.client_state["mixing"].std()) > 1e-4

    @pytest.mark.parametrize("adaptive", [False, True])
    def test_linear_models_do_not_tell_the_two_apart(self, engine: str, adaptive: bool) -> None:
        a, b = (
            fit(APFL(0.4, adaptive, mix), small_clients(), linear_module(), 3, engine)
            for mix in ("parameters", "outputs")
        )
        assert_trees_close(a.client_state, b.client_state)
        assert_trees_close(a.server, b.server)

    def test_networks_do(self, engine: str) -> None:
        a, b = (
            fit(APFL(0.4, mix=mix), small_clients(), plain_module(0.3), 3, engine)
            for mix in ("parameters", "outputs")
        )
        change = (
            a.client_state["personal"]["head.weight"] - b.client_state["personal"]["head.weight"]
        )
        assert float(change.abs().max()) > 1e-5

    def test_the_global_model_is_that_of_fedavg(self, engine: str) -> None:
        """Statistics included: the second pass of the global model leaves them alone."""
        a = fit(APFL(0.4, **OUTPUTS), small_clients(), small_module(), 3, engine)
        b = fit(FedAvg(weighting="uniform"), small_clients(), small_module(), 3, engine)
        assert_trees_equal(a.server, b.server)

    def test_share_one_is_local_training(self, engine: str) -> None:
        a = fit(APFL(1.0, **OUTPUTS), small_clients(), small_module(), 3, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 3, engine)
        assert_trees_close(a.client_state["personal"], b.models)

    def test_clients_are_evaluated_and_handed_out_as_mixtures(self, engine: str) -> None:
        data, module = small_clients(shuffle=False), plain_module(0.3)
        run = fit(APFL(0.4, **OUTPUTS), data, module, 2, engine, val_data=data)
        losses = []
        for k in with_data(data):
            x, y = (field[data.indices[k]] for field in data.fields)
            client_state = {n: leaf[k] for n, leaf in run.client_state["personal"].items()}
            first = functional_call(plain_module(), client_state, (x,))
            second = functional_call(plain_module(), run.server["model"], (x,))
            expected = 0.4 * first + 0.6 * second
            losses.append(float(F.cross_entropy(expected, y)))
            with torch.no_grad():
                close(run.strategy.client_module(k)(x), expected)
        assert run.metrics["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)

    def test_one_model_travels_each_way(self, engine: str) -> None:
        method = APFL(**OUTPUTS)
        round = fit(method, small_clients(), plain_module(), 1, engine).recorder.rounds[0]
        assert round.bytes_down == round.bytes_up == 8 * SCALARS


def test_engines_agree_with_batchnorm_for_every_chunk() -> None:
    def run(engine: Any, **options: Any) -> Any:
        method = APFL(0.3, adaptive=True, **OUTPUTS)
        return local_round(method, small_module(), small_clients(), engine, **options).result

    expected = run("reference")
    for transform in ("forward", "grad"):
        found = run("vectorized", transform=transform)
        assert_trees_close(found.uploads, expected.uploads)
        assert_trees_close(found.client_state, expected.client_state)


def test_new_clients_adapt_the_first_model_alone(engine: str) -> None:
    """Also with BatchNorm: the second model is the server's, and stays as it is."""
    data = small_clients()
    new = (data.subset([3]), data.subset([3]))
    adaptation = NewClientAdaptation(new, samples=[4], steps=2, scope="all")
    run = fit(APFL(0.4, **OUTPUTS), data, small_module(), 1, engine, callbacks=[adaptation])
    found, mix = parts(adaptation.results[0].models)
    assert isinstance(mix, Mix)
    (second,) = mix.others
    assert mix.weights.tolist() == [0.4]
    assert_trees_equal({n: leaf[0] for n, leaf in second.items()}, run.server["model"])
    start = small_module().state_dict()
    assert not torch.equal(found["backbone.1.running_mean"][0], start["backbone.1.running_mean"])
    assert not torch.equal(found["head.weight"][0], start["head.weight"])


def test_no_single_state_dict_holds_a_mixture() -> None:
    run = fit(APFL(**OUTPUTS), small_clients(), plain_module())
    with pytest.raises(MisconfigurationException, match=r"APFL mixes the outputs of two\. Use `cl"):
        run.strategy.client_state_dict(0)


def test_steps_have_to_call_the_module() -> None:
    """Else the second model would have no effect, and nobody would notice."""
    with pytest.raises(Exception, match="Expected the steps of QuadraticModule to call the module"):
        fit(APFL(**OUTPUTS), ragged(), QuadraticModule(2))


def test_outputs_have_to_be_tensors() -> None:
    class Pair(PersonalizedModule):
        def forward(self, inputs: Any) -> Any:
            return (super().forward(inputs),)

        def per_sample(self, batch: Any) -> dict[str, Tensor]:
            (output,) = self(batch[0])
            return {"loss": F.cross_entropy(output, batch[1], reduction="none")}

    module = Pair(nn.Flatten(), nn.Linear(25, 3)).double()
    with pytest.raises(Exception, match=r"Expected `forward` to return a tensor, .* but got tuple"):
        fit(APFL(**OUTPUTS), small_clients(), module)


def test_a_mixture_comes_apart_again() -> None:
    first, second = {"w": torch.ones(2)}, {"w": torch.zeros(2), "b": torch.ones(2)}
    share = torch.tensor([0.1, 0.2])
    mixed = mixture(first, second, share)
    assert set(mixed) == {"w", f"{OTHER}w", f"{OTHER}b", SHARE}
    found, mix = parts(mixed)
    assert isinstance(mix, Mix)
    assert (found, mix.others) == (first, (second,))
    assert mix.weights is share
    assert parts(first) == (first, None)


def test_an_unknown_mix_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected `mix` to be 'parameters' or 'outputs', but got"):
        APFL(mix="both")  # type: ignore[arg-type]
