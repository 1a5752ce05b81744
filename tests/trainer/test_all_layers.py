"""Modules that wrap others: compiled, parallel, and models of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from lightning_pfl import FederatedStrategy
from lightning_pfl.methods import FedAvg, FedPer
from tests.trainer.plain import QUIET, Regression, fit, loader, require_plain


class Parallel(Regression):
    """On a machine without GPUs DataParallel calls its layer."""

    def build(self) -> None:
        self.layers = nn.DataParallel(self.layers)


def test_data_parallel() -> None:
    require_plain(Parallel)


@dataclass
class Output:
    """What models of `transformers` return: attributes and items, and a loss with labels."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("loss", "logits"))


class TinyEncoder(nn.Module):
    """Called with a dict by keywords; embeddings tied to the output, masks, causal attention."""

    positions: Tensor

    def __init__(self, words: int = 7, width: int = 4, length: int = 5) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(words, width, padding_idx=0)
        self.places = nn.Embedding(length, width)
        self.register_buffer("positions", torch.arange(length), persistent=False)
        self.query_key_value, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embeddings.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Output:
        hidden = self.embeddings(input_ids) + self.places(self.positions)
        query, key, value = self.query_key_value(hidden).unsqueeze(1).chunk(3, -1)
        mask = attention_mask[:, None, None, :].bool()
        hidden = self.norm(hidden + F.scaled_dot_product_attention(query, key, value, mask)[:, 0])
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return Output(loss, logits)


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyEncoder()
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.0)


def sentences() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    samples = []
    for number in range(8):
        words = torch.randint(1, 7, (5,), generator=generator)
        mask = (torch.arange(5) < 2 + number % 4).long()
        labels = torch.where(mask > 0, words, -100)
        samples.append({"input_ids": words * mask, "attention_mask": mask, "labels": labels})
    return DataLoader(samples, batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_language_models_with_dicts(engine: str) -> None:
    require_plain(Language, rounds=1, local_epochs=2, data=sentences, engine=engine)


def test_a_tied_embedding_is_shared_or_personal_as_one() -> None:
    trainer: Any = fit(Language(), 1, FedPer("model.head"), data=sentences)
    split = trainer.strategy.federation.parameter_split
    assert "model.embeddings.weight" in split.personal


# --- models of transformers, adapters of peft ---


class Pretrained(L.LightningModule):
    """A model of `transformers`, which computes its loss from a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = self.make().double()

    def make(self) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


SMALL = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


class Classifier(Pretrained):
    def make(self) -> Any:
        transformers = pytest.importorskip("transformers")
        settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(
            **SMALL, **settings, intermediate_size=8, max_position_embeddings=8
        )
        return transformers.BertForSequenceClassification(config)


class Writer(Pretrained):
    def make(self) -> Any:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            **SMALL, intermediate_size=8, max_position_embeddings=8, use_cache=False
        )
        return transformers.LlamaForCausalLM(config)


class AdaptedWriter(Writer):
    def make(self) -> Any:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return peft.get_peft_model(super().make(), config)


def labelled() -> DataLoader[Any]:
    samples: Any = sentences().dataset
    return DataLoader(
        [{**sample, "labels": torch.tensor(n % 2)} for n, sample in enumerate(samples)],  # type: ignore[arg-type]
        batch_size=4,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "data"), [(Classifier, labelled), (Writer, sentences), (AdaptedWriter, sentences)]
)
def test_models_of_transformers(kind: type[Pretrained], data: Callable[[], Any]) -> None:
    trainer = require_plain(kind, rounds=1, local_epochs=2, data=data)
    if kind is AdaptedWriter:
        split = trainer.strategy.federation.parameter_split
        assert all("lora_" in name for name in split.trainable)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_layers_that_several_processes_train_are_refused_by_name() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def shard(layers: Any) -> Any:
        fully_shard(layers, mesh=init_device_mesh("cpu", (1,)))
        return layers

    cpu = torch.device("cpu")
    wraps: dict[str, Any] = {
        "'layers.0.weight' is a DTensor": shard,
        "'layers' is DistributedDataParallel": DistributedDataParallel,
        "'layers' is FullyShardedData": lambda layers: FullyShardedDataParallel(
            layers, device_id=cpu
        ),
    }
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for match, wrap in wraps.items():
            module = Regression()
            module.layers = wrap(module.layers)
            with pytest.raises(ValueError, match=match):
                fit(module, 1, FedAvg())
    finally:
        torch.distributed.destroy_process_group()


class Detector(L.LightningModule):
    """A detector of torchvision: lists of images and of targets, a dict of losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        backbone: Any = nn.Sequential(nn.Conv2d(3, 4, 3, stride=8, padding=1), nn.ReLU())
        backbone.out_channels = 4
        anchors = AnchorGenerator(((8,),), ((1.0,),))
        self.model = RetinaNet(
            backbone, num_classes=2, anchor_generator=anchors, min_size=16, max_size=16
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        losses = self.model(list(images), list(targets))
        self.log_dict(losses, on_step=False, on_epoch=True, batch_size=len(images))
        return sum(losses.values())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def pictures() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number in range(4):
        image = torch.rand(3, 16, 16 + 4 * (number % 2), generator=generator, dtype=torch.float64)
        corner = torch.rand(1 + number % 2, 2, generator=generator, dtype=torch.float64) * 8
        boxes = torch.cat([corner, corner + 6], 1)
        samples.append((image, {"boxes": boxes, "labels": torch.ones(len(boxes)).long()}))
    collate: Any = lambda some: tuple(zip(*some, strict=True))  # noqa: E731
    return DataLoader(samples, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]


def test_detection_of_torchvision() -> None:
    trainer = require_plain(Detector, data=pictures)
    choice = trainer.strategy.federation.engine.choices["training_step"]
    assert choice.startswith("sequential")


@pytest.mark.slow
def test_a_compiled_lightning_module_is_refused_by_lightning() -> None:
    compiled: Any = torch.compile(Regression(), backend="eager")
    trainer = L.Trainer(**QUIET, strategy=FederatedStrategy(FedAvg()))
    match = "compiled model is incompatible with the current strategy: `FederatedStrategy`"
    with pytest.raises(RuntimeError, match=match):
        trainer.fit(compiled, loader())
