"""The recurrent network, against its equations."""

import pytest
import torch
from torch import Tensor

from lightning_pfl import FederatedStrategy
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedRep
from lightning_pfl.models import Sent140LSTM
from tests.callbacks.setting import trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


def lstm(inputs: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The last output, step by step."""
    hidden = cell = inputs.new_zeros(len(inputs), 128)
    for token in inputs.unbind(1):
        gates = token @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]
        gates = gates + hidden @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
        enter, forget, new, leave = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
    return hidden


def test_network_is_its_equations() -> None:
    torch.manual_seed(0)
    module = Sent140LSTM(dimensions=7).double().eval()
    inputs = torch.randn(4, 6, 7, dtype=torch.float64)
    backbone, head = module.backbone, module.head.get_submodule("1")
    recurrent, dense = backbone.get_submodule("lstm"), backbone.get_submodule("dense")
    features = torch.relu(dense(lstm(inputs, dict(recurrent.named_parameters()))))
    torch.testing.assert_close(module(inputs), head(features), rtol=1e-12, atol=1e-12)


def test_weights_decay_and_biases_do_not() -> None:
    groups = Sent140LSTM(weight_decay=1e-4).configure_optimizers().param_groups
    found = {group["name"]: (group["weight_decay"], len(group["params"])) for group in groups}
    assert found == {
        "backbone": (1e-4, 3),
        "backbone/no_decay": (0.0, 3),
        "head": (1e-4, 1),
        "head/no_decay": (0.0, 1),
    }


def test_both_engines_train_it_alike() -> None:
    """FedRep with the dropout that is keyed by client and step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, 5, generator=generator, dtype=torch.float64)
    y = torch.arange(20) % 2
    data = FederatedTensorDataset((x, y), [range(0, 9), range(9, 20)], batch_size=4, shuffle=True)
    states = []
    for engine in ("vectorized", "sequential"):
        torch.manual_seed(0)
        module = Sent140LSTM(dimensions=5, lr=0.1).double()
        run = trainer(FedRep(head_epochs=2, body_epochs=1), max_epochs=2, engine=engine)
        run.fit(module, data)
        assert isinstance(run.strategy, FederatedStrategy)
        states.append(run.strategy.client_state_dict(1))
    for name, leaf in states[0].items():
        torch.testing.assert_close(leaf, states[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_dropout_outside_its_range_is_refused(dropout: float) -> None:
    with pytest.raises(ValueError, match=r"`dropout` to be a share in \[0, 1\], but got"):
        Sent140LSTM(dropout=dropout)
