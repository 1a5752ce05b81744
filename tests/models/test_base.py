"""PersonalizedModule: per-sample values, parameter groups, logging, checkpoints, guards."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.models.base import PersonalizedModule, split_decay
from lightning_pfl.testing.fitting import QUIET


def make_module(**settings: Any) -> PersonalizedModule:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU())
    return PersonalizedModule(backbone, nn.Linear(5, 3), **settings).double()


def make_batch(size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def softmax_loss(logits: Tensor, target: Tensor) -> np.ndarray[Any, Any]:
    """Cross-entropy per sample in NumPy: log(sum(exp(z))) - z[target]."""
    z = logits.detach().numpy()
    result: np.ndarray[Any, Any] = np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), target.numpy()]
    return result


def named_parameters_of(module: PersonalizedModule, group: dict[str, Any]) -> set[str]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {names[parameter] for parameter in group["params"]}


class TestPerSample:
    def test_forward_is_head_of_backbone(self) -> None:
        module, (inputs, _) = make_module(), make_batch()
        assert torch.equal(module(inputs), module.head(module.backbone(inputs)))

    def test_cross_entropy_matches_numpy(self) -> None:
        module, batch = make_module(), make_batch()
        values = module.per_sample(batch)
        logits = module(batch[0])
        np.testing.assert_allclose(values["loss"].detach(), softmax_loss(logits, batch[1]))
        hits = logits.detach().numpy().argmax(1) == batch[1].numpy()
        np.testing.assert_array_equal(values["acc"].detach(), hits.astype(float))

    def test_one_hot_targets_equal_indices(self) -> None:
        module, (inputs, target) = make_module(), make_batch()
        one_hot = torch.eye(3, dtype=torch.float64)[target]
        indexed, soft = module.per_sample((inputs, target)), module.per_sample((inputs, one_hot))
        torch.testing.assert_close(soft["loss"], indexed["loss"])
        assert torch.equal(soft["acc"], indexed["acc"])

    def test_binary_loss_matches_numpy(self) -> None:
        module = PersonalizedModule(nn.Flatten(), nn.Linear(6, 1), loss="bce").double()
        inputs = make_batch()[0]
        target = torch.tensor([0, 1, 1, 0, 1])
        z = module(inputs).detach().numpy()[:, 0]
        y = target.numpy()
        p = 1 / (1 + np.exp(-z))
        values = module.per_sample((inputs, target))
        expected = -(y * np.log(p) + (1 - y) * np.log(1 - p))
        np.testing.assert_allclose(values["loss"].detach(), expected)
        np.testing.assert_array_equal(values["acc"].detach(), ((p > 0.5) == y).astype(float))

    def test_squared_error_pairs_each_output_with_its_own_target(self) -> None:
        """A (batch, 1) output minus a (batch,) target must not broadcast to (batch, batch)."""
        module = PersonalizedModule(nn.Flatten(), nn.Linear(6, 1), loss="mse").double()
        inputs = make_batch()[0]
        target = torch.arange(5, dtype=torch.float64)
        values = module.per_sample((inputs, target))
        assert set(values) == {"loss"}
        expected = (module(inputs).detach().numpy()[:, 0] - target.numpy()) ** 2
        np.testing.assert_allclose(values["loss"].detach(), expected)

    def test_elementwise_loss_is_averaged_within_a_sample(self) -> None:
        module = make_module(loss=nn.L1Loss(reduction="none"))
        inputs, _ = make_batch()
        target = torch.ones(5, 3, dtype=torch.float64)
        expected = np.abs(module(inputs).detach().numpy() - 1).mean(1)
        values = module.per_sample((inputs, target))
        np.testing.assert_allclose(values["loss"].detach(), expected)

    def test_function_as_loss_reports_accuracy_if_it_is_classification(self) -> None:
        loss = nn.CrossEntropyLoss(reduction="none")
        assert set(make_module(loss=loss).per_sample(make_batch())) == {"loss"}
        values = make_module(loss=loss, num_classes=3).per_sample(make_batch())
        assert torch.equal(values["acc"], make_module().per_sample(make_batch())["acc"])

    def test_masked_mean_has_the_gradient_of_the_short_batch(self) -> None:
        module, (inputs, target) = make_module(), make_batch(5)
        parameters = list(module.parameters())
        short = module.per_sample((inputs[:3], target[:3]))["loss"].mean()
        expected = torch.autograd.grad(short, parameters)
        mask = torch.tensor([1.0, 1, 1, 0, 0], dtype=torch.float64)
        padded = (module.per_sample((inputs, target))["loss"] * mask).sum() / mask.sum()
        for got, want in zip(torch.autograd.grad(padded, parameters), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)

    def test_runs_under_vmap_with_one_model_per_client(self) -> None:
        module, other = make_module(), make_module()
        with torch.no_grad():
            other.head.get_parameter("weight").mul_(-1)
        wrapped = _PerSample(module)
        models = [wrapped.state_dict(), _PerSample(other).state_dict()]
        stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
        batch = make_batch()

        def losses(model: dict[str, Tensor]) -> Tensor:
            values: dict[str, Tensor] = functional_call(wrapped, model, batch)
            return values["loss"]

        expected = torch.stack([m.per_sample(batch)["loss"] for m in (module, other)])
        torch.testing.assert_close(vmap(losses)(stacked), expected)


class _PerSample(nn.Module):
    """Makes `per_sample` a forward, which is what `functional_call` calls."""

    def __init__(self, module: PersonalizedModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        return self.module.per_sample((inputs, target))


class TestOptimizer:
    def test_groups_hold_the_right_parameters(self) -> None:
        module = make_module()
        groups = {g["name"]: g for g in module.configure_optimizers().param_groups}
        assert {name: named_parameters_of(module, group) for name, group in groups.items()} == {
            "backbone": {"backbone.0.weight"},
            "backbone/no_decay": {"backbone.0.bias", "backbone.1.weight", "backbone.1.bias"},
            "head": {"head.weight"},
            "head/no_decay": {"head.bias"},
        }
        assert {name: g["weight_decay"] for name, g in groups.items()} == {
            "backbone": 1e-4,
            "backbone/no_decay": 0.0,
            "head": 1e-4,
            "head/no_decay": 0.0,
        }
        assert {(g["lr"], g["momentum"]) for g in groups.values()} == {(0.01, 0.5)}

    def test_each_half_has_its_own_settings(self) -> None:
        module = make_module(
            backbone_lr=0.1, head_lr=0.2, backbone_weight_decay=0.3, head_weight_decay=0.4
        )
        groups = module.configure_optimizers().param_groups
        assert {g["name"]: (g["lr"], g["weight_decay"]) for g in groups} == {
            "backbone": (0.1, 0.3),
            "backbone/no_decay": (0.1, 0.0),
            "head": (0.2, 0.4),
            "head/no_decay": (0.2, 0.0),
        }

    def test_decay_bias_leaves_two_groups(self) -> None:
        groups = make_module(decay_bias=True).configure_optimizers().param_groups
        assert [(g["name"], len(g["params"]), g["weight_decay"]) for g in groups] == [
            ("backbone", 4, 1e-4),
            ("head", 2, 1e-4),
        ]

    def test_biases_and_norm_layers_do_not_decay(self) -> None:
        """With a zero gradient, a step with lr and decay multiplies the weights by 1 - lr * wd."""
        module = make_module(lr=0.5, weight_decay=0.2)
        nn.init.ones_(module.head.get_parameter("bias"))
        before = {name: value.clone() for name, value in module.named_parameters()}
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        module.configure_optimizers().step()
        for name, value in module.named_parameters():
            factor = 1 - 0.5 * 0.2 if name in ("backbone.0.weight", "head.weight") else 1.0
            torch.testing.assert_close(value, factor * before[name], rtol=1e-12, atol=0)

    @pytest.mark.parametrize(
        ("layer", "weights"),
        [
            (nn.BatchNorm2d(3), set()),
            (nn.GroupNorm(1, 3), set()),
            (nn.LSTM(2, 3), {"weight_ih_l0", "weight_hh_l0"}),
            (nn.MultiheadAttention(4, 2), {"in_proj_weight", "out_proj.weight"}),
            (nn.Embedding(4, 2), {"weight"}),
        ],
    )
    def test_split_decay_knows_biases_by_any_name(
        self, layer: nn.Module, weights: set[str]
    ) -> None:
        names = {parameter: name for name, parameter in layer.named_parameters()}
        decayed, others = split_decay(layer)
        assert {names[p] for p in decayed} == weights
        assert {names[p] for p in others} == set(names.values()) - weights

    def test_split_decay_counts_a_shared_weight_once(self) -> None:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        decayed, others = split_decay(nn.Sequential(first, second))
        assert (len(decayed), len(others)) == (1, 2)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("sgd", torch.optim.SGD),
            ("adam", torch.optim.Adam),
            ("adamw", torch.optim.AdamW),
            ("rmsprop", torch.optim.RMSprop),
        ],
    )
    def test_named_optimizers(self, name: Any, kind: type[torch.optim.Optimizer]) -> None:
        optimizer = make_module(optimizer=name, lr=0.3).configure_optimizers()
        assert type(optimizer) is kind
        assert {g["lr"] for g in optimizer.param_groups} == {0.3}
        expected = {0.5} if name in ("sgd", "rmsprop") else {None}
        assert {g.get("momentum") for g in optimizer.param_groups} == expected

    def test_function_as_optimizer_keeps_its_own_settings(self) -> None:
        module = make_module(
            optimizer=lambda groups: torch.optim.Adam(groups, lr=3e-4, weight_decay=0.1),
            head_lr=0.2,
        )
        groups = {g["name"]: g for g in module.configure_optimizers().param_groups}
        assert (groups["backbone"]["lr"], groups["backbone"]["weight_decay"]) == (3e-4, 0.1)
        assert (groups["head"]["lr"], groups["head/no_decay"]["weight_decay"]) == (0.2, 0.0)


class TestInTrainer:
    def test_accuracy_of_predictions_that_are_nan_is_nan(self, tmp_path: Path) -> None:
        """NumPy and torch find the largest of three NaN in the first place, which is the class."""
        inputs = torch.zeros(4, 6, dtype=torch.float64)
        inputs[3] = float("nan")
        loader = DataLoader(TensorDataset(inputs, torch.zeros(4, dtype=torch.long)), batch_size=2)
        trainer = make_trainer(tmp_path)
        (found,) = trainer.validate(make_module(num_classes=3), loader, verbose=False)
        assert np.isnan(found["val_loss"])
        assert np.isnan(found["val_acc"])

    def test_logs_means_over_samples(self, tmp_path: Path) -> None:
        """Batches of 4, 4 and 2: the epoch's value is the mean over samples, not over batches."""
        module, (inputs, target) = make_module(lr=0.0), make_batch(10)
        loader = DataLoader(TensorDataset(inputs, target), batch_size=4)
        trainer = make_trainer(tmp_path)
        trainer.fit(module, loader, loader)
        logged = {**trainer.callback_metrics}
        trainer.test(module, loader, verbose=False)
        logged.update(trainer.callback_metrics)
        logits = module(inputs).detach()
        loss = softmax_loss(logits, target).mean()
        acc = (logits.argmax(1) == target).double().mean()
        for stage in ("train", "val", "test"):
            assert float(logged[f"{stage}_loss"]) == pytest.approx(loss, rel=1e-6)
            assert float(logged[f"{stage}_acc"]) == pytest.approx(float(acc), rel=1e-6)

    def test_predict_returns_outputs_for_inputs_and_pairs(self, tmp_path: Path) -> None:
        module, (inputs, target) = make_module(), make_batch()
        for data in (TensorDataset(inputs), TensorDataset(inputs, target)):
            outputs = make_trainer(tmp_path).predict(module, DataLoader(data, batch_size=5))
            assert outputs is not None
            torch.testing.assert_close(outputs[0], module(inputs))
        assert torch.equal(module.predict_step(inputs), module(inputs))

    def test_checkpoint_is_plain_and_loads(self, tmp_path: Path) -> None:
        module = make_module(
            head_lr=0.25,
            backbone_lr=0.25,
            loss=nn.CrossEntropyLoss(reduction="none"),
            optimizer=torch.optim.SGD,
        )
        trainer = make_trainer(tmp_path)
        loader = DataLoader(TensorDataset(*make_batch()), batch_size=5)
        trainer.fit(module, loader, loader)
        path = tmp_path / "last.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)["hyper_parameters"]
        # Functions and modules aren't plain: whoever loads brings them, as the backbone.
        assert set(saved).isdisjoint({"backbone", "head", "loss", "optimizer"})
        twin = make_module()
        loaded = PersonalizedModule.load_from_checkpoint(
            path, backbone=twin.backbone, head=twin.head, weights_only=True
        )
        assert loaded.hparams["head_lr"] == 0.25
        torch.testing.assert_close(loaded.state_dict(), module.state_dict())

    # LightningCLI 2.6 calls jsonargparse by names that were renamed in 4.49.
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_lightning_cli_builds_it_from_class_paths(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # LightningCLI warns if it gets arguments from Python and from the command line.
        monkeypatch.setattr("sys.argv", ["fit"])
        model = {
            "class_path": "lightning_pfl.models.base.PersonalizedModule",
            "init_args": {
                "backbone": linear(6, 5),
                "head": linear(5, 3),
                "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.003}},
                "head_lr": 0.1,
            },
        }
        cli = LightningCLI(
            L.LightningModule,
            run=False,
            subclass_mode_model=True,
            save_config_callback=None,
            seed_everything_default=False,
            args={"model": model, "trainer": trainer_settings(tmp_path)},
        )
        groups = {g["name"]: g for g in cli.model.configure_optimizers().param_groups}
        assert (groups["backbone"]["lr"], groups["head"]["lr"]) == (0.003, 0.1)
        inputs, target = make_batch()
        data = TensorDataset(inputs.float(), target)
        loader = DataLoader(data, batch_size=5)
        cli.trainer.fit(cli.model, loader, loader)
        path = tmp_path / "cli.ckpt"
        cli.trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        assert saved["hyper_parameters"]["head_lr"] == 0.1
        assert set(saved["state_dict"]) == {
            "backbone.weight",
            "backbone.bias",
            "head.weight",
            "head.bias",
        }


def linear(inputs: int, outputs: int) -> dict[str, Any]:
    """A linear layer as a recipe writes it."""
    arguments = {"in_features": inputs, "out_features": outputs}
    return {"class_path": "torch.nn.Linear", "init_args": arguments}


def trainer_settings(root: Path) -> dict[str, Any]:
    return {
        "default_root_dir": str(root),
        "devices": 1,
        "max_epochs": 1,
        **QUIET,
        "num_sanity_val_steps": 0,
    }


def make_trainer(root: Path) -> L.Trainer:
    return L.Trainer(**trainer_settings(root))


class TestGuards:
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"backbone": 3}, TypeError, r"Expected `backbone` to be an nn\.Module, but got .*=3"),
            ({"head": "head"}, TypeError, r"Expected `head` to be an nn\.Module, but got head='h"),
            (
                {"loss": "hinge"},
                ValueError,
                r"Expected `loss` to be one of .* but got loss='hinge'",
            ),
            ({"loss": 1.0}, TypeError, r"Expected `loss` to be one of .* but got loss=1\.0"),
            ({"optimizer": "lion"}, ValueError, r"Expected `optimizer` .* got optimizer='lion'"),
            ({"optimizer": None}, TypeError, r"Expected `optimizer` .* got optimizer=None"),
            ({"lr": -0.1}, ValueError, r"Expected `lr` to be in \[0, inf\), but got lr=-0\.1"),
            ({"lr": float("nan")}, ValueError, r"Expected `lr` .* but got lr=nan"),
            ({"head_lr": -1}, ValueError, r"Expected `head_lr` .* but got head_lr=-1"),
            ({"backbone_lr": -1}, ValueError, r"Expected `backbone_lr` .* got backbone_lr=-1"),
            ({"weight_decay": -1}, ValueError, r"Expected `weight_decay` .* got weight_decay=-1"),
            ({"head_weight_decay": -1}, ValueError, r"Expected `head_weight_decay` to be in"),
            ({"backbone_weight_decay": -1}, ValueError, r"Expected `backbone_weight_decay` to be"),
            ({"momentum": 1.0}, ValueError, r"Expected `momentum` to be in \[0, 1\.0\), but got"),
            ({"num_classes": 0}, ValueError, r"Expected `num_classes` to be a positive int"),
        ],
    )
    def test_wrong_setting(
        self, settings: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        arguments = {"backbone": nn.Flatten(), "head": nn.Linear(6, 3), **settings}
        with pytest.raises(error, match=message):
            PersonalizedModule(**arguments)

    @pytest.mark.parametrize("batch", [torch.zeros(5, 6), {"x": 1}, (torch.zeros(5, 6),)])
    def test_batch_that_is_no_pair(self, batch: Any) -> None:
        with pytest.raises(TypeError, match=r"Expected `batch` to be a pair .* Override"):
            make_module().per_sample(batch)

    def test_loss_reduced_to_its_mean(self) -> None:
        module = make_module(loss=nn.CrossEntropyLoss())
        with pytest.raises(ValueError, match=r"one value per sample, .* Use reduction='none'"):
            module.per_sample(make_batch())

    def test_head_of_another_width(self) -> None:
        with pytest.raises(ValueError, match=r"got num_classes=4 and outputs of shape \(5, 3\)"):
            make_module(num_classes=4).per_sample(make_batch())

    def test_target_of_another_shape(self) -> None:
        message = r"Expected `target` .* got target=\(5,\) and output=\(5, 3\)"
        with pytest.raises(ValueError, match=message):
            make_module(loss="mse").per_sample((make_batch()[0], torch.zeros(5)))
