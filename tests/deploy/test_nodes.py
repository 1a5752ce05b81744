"""A node is let in if what it says of itself can be true; what it says otherwise is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from lightning_pfl import __version__
from lightning_pfl.deploy.nodes import Nodes, Presence, Reply
from lightning_pfl.deploy.packet import Packet

NONE = {"samples": 0, "minibatches": 0, "batch_size": 0, "drop_last": False}
TRAIN = {"samples": 10, "minibatches": 2, "batch_size": 5, "drop_last": False}
COUNTS = {"train": TRAIN, "val": NONE, "test": NONE}
HELLO: dict[str, Any] = {
    "protocol": 1,
    "version": __version__,
    "digest": {"model": "m"},
    "counts": {"a": COUNTS},
}


@dataclass
class Script:
    """A network whose nodes answer as a function says."""

    answers: Callable[[int, Packet], Packet | None]
    here: list[Presence] = field(default_factory=lambda: [Presence(1, "a")])
    waiting: dict[str, Reply] = field(default_factory=dict)
    asked: list[tuple[int, str]] = field(default_factory=list)
    slow: str = ""  # a kind of question whose answers don't come

    def present(self) -> Sequence[Presence]:
        return self.here

    def send(self, node: int, kind: str, data: bytes) -> str:
        number = str(len(self.asked))
        self.asked.append((node, kind))
        answer = self.answers(node, Packet.from_bytes(data))
        self.waiting[number] = (
            Reply(number, error="node unavailable")
            if answer is None
            else Reply(number, answer.to_bytes())
        )
        return number

    def replies(self, questions: Sequence[str], limit: int) -> Sequence[Reply]:
        come = [q for q in questions if q in self.waiting and self.asked[int(q)][1] != self.slow]
        return [self.waiting.pop(q) for q in come]


def nodes_of(line: Script, said: list[str], **settings: Any) -> Nodes:
    known: dict[str, Any] = {"owners": {"a": "a", "b": "b"}, "timeout": 0.2, "pause": 0.0}
    known |= {"max_samples": 100, "say": said.append} | settings
    nodes = Nodes(line, ["a", "b"], digest={"model": "m"}, **known)
    nodes.join = lambda: Packet("join")
    return nodes


def greeting(**changes: Any) -> Callable[[int, Packet], Packet]:
    def answer(node: int, question: Packet) -> Packet:
        return Packet("hello", HELLO | changes) if question.kind == "hello" else Packet("joined")

    return answer


def without(name: str) -> Callable[[int, Packet], Packet]:
    return lambda node, question: Packet("hello", {k: v for k, v in HELLO.items() if k != name})


def counts(**changes: Any) -> Callable[[int, Packet], Packet]:
    return greeting(counts={"a": COUNTS | {"train": TRAIN | changes}})


LIES: dict[str, tuple[Callable[[int, Packet], Packet], str]] = {
    "another kind": (lambda *_: Packet("trained"), "answer is 'trained'"),
    "a kind without end": (lambda *_: Packet("x" * 10**6), "answer is 'x{400,500}\\.$"),
    "a refusal": (lambda *_: Packet("refused", {"reason": "\x1b[2Jno"}), r"refuses: \[2Jno"),
    "no counts": (without("counts"), "lacks 'counts'"),
    "no protocol": (without("protocol"), "lacks 'protocol'"),
    "another protocol": (greeting(protocol=2), "version 2 of the protocol"),
    "another recipe": (greeting(digest={"model": "n"}), "another one: model differs"),
    "nobody": (greeting(counts={}), "it has no clients"),
    "a stranger": (greeting(counts={"c": COUNTS}), "'c', which isn't a client"),
    "another's name": (greeting(counts={"b": COUNTS}), "'b', whose key it doesn't have"),
    "counts of text": (greeting(counts={"a": "many"}), "aren't those of train, val, test"),
    "fewer splits": (greeting(counts={"a": {"train": TRAIN}}), "aren't those of train"),
    "too many samples": (counts(samples=101), r"is 101, not within 0..100"),
    "fewer than none": (counts(samples=-1), r"is -1, not within"),
    "half a sample": (counts(samples=1.5), r"is 1.5, not within"),
    "a true number": (counts(minibatches=True), r"is True, not within"),
    "one more number": (counts(labels=3), "aren't samples, minibatches"),
}


@pytest.mark.parametrize("lie", LIES)
def test_who_lies_when_greeted_is_not_let_in(lie: str) -> None:
    answers, reason = LIES[lie]
    said: list[str] = []
    nodes = nodes_of(Script(answers), said)
    for _ in range(3):
        nodes.look()
    assert (nodes.home, nodes.counts) == ({}, {})
    (line,) = said
    assert re.search(rf"^a isn't let in: .*{reason}", line)


@pytest.mark.parametrize("labels", [None, {}, {"a": "all"}, {"a": [9]}, {"a": [12, -2]}])
def test_label_counts_must_be_those_of_the_samples(labels: Any) -> None:
    said: list[str] = []
    nodes = nodes_of(Script(greeting(labels=labels)), said, needs_labels=True)
    nodes.look()
    assert said[0].startswith("a isn't let in: ")
    assert re.search("label|'a'", said[0])
    nodes = nodes_of(Script(greeting(labels={"a": [4, 6]})), said, needs_labels=True)
    nodes.look()
    assert nodes.labels == {"a": [4, 6]}


def test_another_version_is_named() -> None:
    said: list[str] = []
    nodes = nodes_of(Script(greeting(version="0.0.1")), said)
    nodes.look()
    nodes.look()
    assert said == [f"a runs lightning_pfl 0.0.1, not {__version__}.", "a is here with a."]


def test_data_that_changed_are_refused() -> None:
    said: list[str] = []
    line = Script(greeting())
    nodes = nodes_of(line, said)
    nodes.look()
    line.answers, line.here = counts(samples=11), [Presence(1, "a", "later")]
    nodes.look()
    assert said[-1] == "a isn't let in: the data of 'a' are other ones than when it joined."


def test_without_keys_the_first_who_claims_a_client_keeps_it() -> None:
    said: list[str] = []
    line = Script(greeting(), here=[Presence(1)])
    nodes = nodes_of(line, said, owners={})
    for _ in range(2):
        nodes.look()
    line.here = [Presence(1), Presence(2)]
    nodes.look()
    assert nodes.home == {"a": 1}
    assert said[-1] == "node 2 isn't let in: it says that it is 'a', which another node is."


def test_a_node_that_went_away_and_came_back_is_asked_again() -> None:
    def answers(node: int, question: Packet) -> Packet | None:
        if question.kind != "train":
            return greeting()(node, question)
        return None if line.asked.count((1, "train")) == 1 else Packet("trained", {"n": 2})

    said: list[str] = []
    line = Script(answers)
    nodes = nodes_of(line, said, timeout=60.0)
    (answer,) = nodes.ask("train", ["a"], lambda at: Packet("train"), lambda count: 1000)
    assert answer.packet is not None
    assert (answer.clients, answer.at.tolist(), answer.packet.meta) == (["a"], [0], {"n": 2})
    assert "No answer of a yet: node unavailable." in said


def test_who_does_not_answer_in_time_is_named_and_the_late_answer_is_not_read() -> None:
    line = Script(greeting(), slow="train")
    nodes = nodes_of(line, [])

    def asked() -> list[tuple[list[str], str]]:
        found = nodes.ask("train", ["b", "a"], lambda at: Packet("train"), lambda count: 1000)
        return [(answer.clients, answer.reason) for answer in found]

    assert asked() == [(["b", "a"], "no answer within 0.2 s")]
    (late,) = line.waiting
    line.slow = ""
    assert asked() == [(["a"], ""), (["b"], "no answer within 0.2 s")]
    assert late in line.waiting


def test_a_node_is_asked_once_for_all_its_clients() -> None:
    line = Script(greeting(counts={"a": COUNTS, "b": COUNTS}))
    nodes = nodes_of(line, [], owners={"a": "a", "b": "a"})
    at: list[Tensor] = []

    def question(some: Tensor) -> Packet:
        at.append(some)
        return Packet("train")

    (answer,) = nodes.ask("train", ["b", "a"], question, lambda count: 1000)
    assert [some.tolist() for some in at] == [[0, 1]]
    assert answer.clients == ["b", "a"]
