"""Secure aggregation: a server that learns the mean of its clients' models, and no model.

Flower's SecAgg+: its workflow on the server, its modifier on the nodes. Flower draws each mask from
32 bits, by a generator that isn't made for secrets; here masks are ChaCha20's key stream. The
protocol keeps a secret from a server that looks, not from one that lies to its nodes about the
keys of the others.

Reference:
    Bell et al. Secure Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS 2020.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_pfl.core.randomness import seeded
from lightning_pfl.core.tree import Tree
from lightning_pfl.deploy.packet import UNREADABLE, PacketError

LEVELS = 2**22
"""Levels of an entry: it is rounded to one of them within the clipping range."""
MODULUS = 2**32
"""Sums are taken modulo this number, enough for 1024 nodes."""
SHARE = 2 / 3
"""Fraction of the nodes that must stay until the end of a round."""
FEWEST = 3
"""Nodes at least: of two, each would know the other's model from the mean."""

Record = Any  # Flower's RecordDict

log = logging.getLogger(__name__)


def draw_masks(seed: bytes, modulus: int, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Draw masks, int64 below ``modulus``, from a secret: in the place of Flower's generator."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    cipher = Cipher(ChaCha20(hashlib.sha256(seed).digest(), bytes(16)), mode=None).encryptor()
    masks = []
    for shape in shapes:
        drawn = np.frombuffer(cipher.update(bytes(4 * math.prod(shape))), "<u4")
        masks.append(drawn.astype(np.int64).reshape(shape) % modulus)
    return masks


def to_bytes(record: Record) -> NDArray[np.uint8]:
    """Write a record of Flower's as an array of bytes."""
    from flwr.common.serde import recorddict_to_proto

    data = recorddict_to_proto(record).SerializeToString()
    return np.frombuffer(data, np.uint8)


def from_bytes(data: NDArray[Any]) -> Record:
    """Undo :func:`to_bytes`.

    Raises:
        PacketError: If it is no record.
    """
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict
    from google.protobuf.message import DecodeError

    found = RecordDict()
    try:
        found.ParseFromString(data.tobytes())
        return recorddict_from_proto(found)
    except (DecodeError, AttributeError, *UNREADABLE) as error:
        raise PacketError("record can't be read") from error


class Masks:
    """A node's side: its keys and shares of a round.

    Attributes:
        clipping_range: Largest absolute value of an entry, as the server said at the setup.
    """

    def __init__(self) -> None:
        from flwr.app import Context, RecordDict

        self._context = Context(0, 0, {}, RecordDict(), {})
        self.clipping_range = 0.0

    def answer(
        self, party: int, record: Record, model: Callable[[], tuple[Tensor, float]] | None = None
    ) -> Record:
        """Answer a stage of the protocol.

        Args:
            party: The number of this node in the protocol.
            record: What the server says.
            model: Gives the entries to be masked, float64 ``(entries,)``, and their weight; None
                for a stage without them.

        Raises:
            PacketError: If the server asks for less secrecy than :data:`SHARE` gives, or if the
                model is beyond the clipping range.
        """
        from flwr.app import Message, Metadata
        from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
        from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS as KEY
        from flwr.compat.common.recorddict_compat import fitres_to_recorddict

        flower: Any = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
        flower.pseudo_rand_gen = draw_masks
        stage = record.config_records[KEY]
        if stage.get("stage") == "setup":
            self._check(stage)
        elif stage.get("stage") == "unmask" and {*stage["active_nids"]} & {*stage["dead_nids"]}:
            raise PacketError("both masks of a node together are no secret")
        elif stage.get("stage") == "collect_masked_vectors" and model is None:
            raise PacketError("masked models come with training")

        def train(message: Any, context: Any) -> Any:
            assert model is not None
            entries, weight = model()
            if not bool((entries.abs() <= self.clipping_range).all()):
                raise PacketError(
                    f"an entry of the model is beyond clipping_range={self.clipping_range}"
                )
            parameters = ndarrays_to_parameters([entries.numpy()])
            result = FitRes(Status(Code.OK, ""), parameters, weight, {})  # type: ignore[arg-type]
            return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)

        about: Any = Metadata(
            run_id=0,
            message_id="",
            src_node_id=0,
            dst_node_id=party,
            reply_to_message_id="",
            group_id="",
            created_at=0.0,
            ttl=1e9,
            message_type="train",
        )
        make: Any = Message  # its overloads leave this one out
        question = make(record, metadata=about)
        return flower.secaggplus_mod(question, self._context, train).content

    def _check(self, stage: Mapping[str, Any]) -> None:
        nodes, threshold = stage.get("sample_num"), stage.get("threshold")
        shares, levels = stage.get("share_num"), (stage.get("target_range"), stage.get("mod_range"))
        if (
            type(nodes) is not int
            or nodes < FEWEST
            or shares != nodes
            or levels != (LEVELS, MODULUS)
        ):
            raise PacketError(f"masks for {nodes} nodes and {shares} shares are no secret")
        if threshold != _threshold(nodes):
            raise PacketError(f"masks with a threshold of {threshold} nodes are no secret")
        self.clipping_range = float(stage["clipping_range"])


def check_masked(record: Record, entries: int) -> None:
    """Check the form of a masked model before Flower makes arrays of it.

    Args:
        record: What a node has sent.
        entries: The expected entries.

    Raises:
        PacketError: If it is of another form.
    """
    known = record.config_records
    parts = known["secaggplus_configs"].get("masked_params") if known else None
    if not isinstance(parts, list) or len(parts) != 2:
        raise PacketError("masked model is of another form")
    for part, count in zip(parts, (1, entries), strict=True):
        header = _header(count)
        if len(part) != len(header) + 8 * count or not part.startswith(header):
            raise PacketError(f"masked model isn't {count} numbers")


def _header(entries: int) -> bytes:
    """Write the first bytes of a numpy file with an int64 vector."""
    file = io.BytesIO()
    form = {"descr": "<i8", "fortran_order": False, "shape": (entries,)}
    np.lib.format.write_array_header_1_0(file, form)
    return file.getvalue()


def _threshold(nodes: int) -> int:
    return max(round(SHARE * nodes), 2)


class Aggregation:
    """The server's side of a round.

    Args:
        weights: By party, its weight in the mean.
        clipping_range: Largest absolute value of an entry.
        ask: Brings the records of a stage to the parties, and their answers back; told whether
            parties train now.

    Attributes:
        mean: The mean of the nodes' entries, float64 ``(entries,)``; None if too few stayed.
        included: Parties whose models are in it.
    """

    def __init__(
        self,
        weights: Mapping[int, float],
        clipping_range: float,
        ask: Callable[[Mapping[int, Record], bool], Mapping[int, Record]],
    ) -> None:
        self.weights, self.clipping_range, self.ask = weights, clipping_range, ask
        self.mean: NDArray[Any] | None = None
        self.included: set[int] = set()

    def run(self) -> None:
        """Run the four stages of Flower's workflow."""
        from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
        from flwr.server import LegacyContext
        from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

        flower: Any = import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")
        flower.pseudo_rand_gen = draw_masks
        if len(self.weights) < FEWEST:
            return
        state = RecordDict()
        state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
        state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
        parties: Any = SimpleNamespace(num_available=lambda: len(self.weights))
        context = LegacyContext(Context(0, 0, {}, state, {}), None, cast("Any", self), parties)

        class Workflow(flower.SecAggPlusWorkflow):  # type: ignore[misc]
            """Flower's, which would ask for shares of those who left before they gave any."""

            def share_keys_stage(self, grid: Any, context: Any, state: Any) -> bool:
                """Share keys among those who are there."""
                enough: bool = super().share_keys_stage(grid, context, state)
                here = state.sampled_node_ids = set(state.active_node_ids)
                known = state.nid_to_neighbours.items()
                state.nid_to_neighbours = {party: others & here for party, others in known}
                return enough

        workflow = Workflow(
            num_shares=1.0,
            reconstruction_threshold=SHARE,
            max_weight=max(self.weights.values()),
            clipping_range=self.clipping_range,
            quantization_range=LEVELS,
            modulus_range=MODULUS,
        )
        try:
            with seeded(0, everything=True):  # Flower shuffles the parties
                workflow(self, context)
        except Exception:
            # Shares and keys of a node that lies end in any error of Flower's, and in no mean.
            log.warning("Secure aggregation failed.", exc_info=True)

    def configure_fit(self, *_: Any) -> list[tuple[Any, Any]]:
        """Name the parties to Flower, as its strategies do."""
        from flwr.common import FitIns, Parameters

        nothing = FitIns(Parameters([], ""), {})
        return [(SimpleNamespace(node_id=party), nothing) for party in self.weights]

    def aggregate_fit(
        self, round: int, results: list[tuple[Any, Any]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        """Take the mean from Flower, as its strategies do."""
        from flwr.common import parameters_to_ndarrays

        self.included = {proxy.node_id for proxy, _ in results}
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}

    def send_and_receive(self, messages: Iterable[Any], timeout: float | None = None) -> list[Any]:
        """Send messages of a stage, and wait for the answers, as Flower's network does."""
        from flwr.app import Message

        sent = {message.metadata.dst_node_id: message for message in messages}
        training = any("fitins.parameters" in m.content.array_records for m in sent.values())
        found = self.ask({party: message.content for party, message in sent.items()}, training)
        return [Message(record, reply_to=sent[party]) for party, record in found.items()]


def average(model: Tree, weights: Tensor) -> tuple[Tensor, float]:
    """Average the models of a node's clients, and give their weight.

    Args:
        model: The models, ``(clients, ...)``; entries that aren't floats are left out.
        weights: Their weights, ``(clients,)``.

    Returns:
        Entries of the mean, float64 ``(entries,)`` in the order of the model, and the weight.
    """
    total = weights.double().sum()
    fractions = weights.double() / total
    parts = [
        torch.tensordot(fractions, leaf.double().cpu(), 1).flatten()
        for leaf in model.values()
        if leaf.is_floating_point()
    ]
    return torch.cat(parts), float(total)


def split(entries: NDArray[Any], model: Tree) -> Tree:
    """Undo :func:`average`: give entries the names, forms and dtypes of ``(clients, ...)`` models.

    Returns:
        One model, without the entries that aren't floats.
    """
    floats = {name: leaf for name, leaf in model.items() if leaf.is_floating_point()}
    parts = torch.from_numpy(entries).split([leaf[0].numel() for leaf in floats.values()])
    return {
        name: part.reshape(leaf.shape[1:]).to(leaf.dtype)
        for (name, leaf), part in zip(floats.items(), parts, strict=True)
    }
