"""Messages are read without running code, and without believing a size."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.deploy.packet import DTYPES, HEADER, MAGIC, Packet, PacketError
from lightning_pfl.deploy.wire import (
    Writer,
    form_nbytes,
    form_of,
    read_counts,
    read_form,
    read_numbers,
    read_rows,
    read_tree,
)


def raw(header: Any, numbers: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + numbers


def header(*arrays: Any, meta: Any = None) -> dict[str, Any]:
    return {"kind": "k", "meta": {} if meta is None else meta, "arrays": list(arrays)}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_arrays_come_back_as_they_were(dtype: str) -> None:
    leaf = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, dtype))
    writer = Writer()
    writer.add_tree({"a/b~": leaf, "scalar": leaf[0, 0], "none": {}, "few": leaf[:0]}, "x")
    packet = writer.packet("k", {"é": [1.5, None, float("nan")]})
    found = Packet.from_bytes(packet.to_bytes())
    assert (found.kind, str(found.meta)) == ("k", str(packet.meta))
    tree = read_tree(found, "x")
    assert tree["none"] == {}
    for name, expected in (("a/b~", leaf), ("scalar", leaf[0, 0]), ("few", leaf[:0])):
        assert tree[name].dtype == expected.dtype
        assert torch.equal(tree[name], expected)


def test_what_all_clients_share_travels_once() -> None:
    shared = torch.arange(4.0).expand(3, 4)
    writer = Writer()
    writer.add_rows({"same": shared, "own": shared.clone()}, "x")
    packet = writer.packet("k", {})
    assert packet.nbytes == 4 * 4 + 3 * 4 * 4
    found = read_rows(Packet.from_bytes(packet.to_bytes()), "x", 3)
    assert found["same"].stride(0) == 0
    assert torch.equal(found["same"], shared)
    assert torch.equal(found["own"], shared)
    with pytest.raises(PacketError, match="3 rows for 2 clients"):
        read_rows(packet, "x", 2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "another format"),
        (pickle.dumps({"a": 1}), "another format"),
        (MAGIC, "header of 0 bytes"),
        (MAGIC + (2**62).to_bytes(8, "little") + b"{}", f"header of {2**62} bytes"),
        (MAGIC + (HEADER + 1).to_bytes(8, "little") + b" " * (HEADER + 1), "header of"),
        (raw(b"["), "can't be read"),
        (raw(b"[" * 100_000), "can't be read"),
        (raw(b"\xff"), "can't be read"),
        (raw([]), "can't be read"),
        (raw({"kind": 1, "meta": {}, "arrays": []}), "another form"),
        (raw({"kind": "k", "meta": [], "arrays": []}), "another form"),
        (raw(header("a")), "isn't a path, a dtype and a shape"),
        (raw(header(["a", "object", [1]]), b"12345678"), "of dtype 'object'"),
        (raw(header(["a", "<U9", [1]]), b"12345678"), "of dtype '<U9'"),
        (raw(header(["a", "float32", [-1]]), b"1234"), r"has the shape \[-1\]"),
        (raw(header(["a", "float32", [True]]), b"1234"), r"has the shape \[True\]"),
        (raw(header(["a", "float32", [1.0]]), b"1234"), r"has the shape \[1.0\]"),
        (raw(header(["a", "float32", [1] * 99]), b"1234"), "has the shape"),
        (raw(header(["a", "float32", [10**12]]), b"1234"), "the message ends before"),
        (raw(header(["a", "float32", [2**32, 2**32]]), b"1234"), "the message ends before"),
        (raw(header(["a", "float32", [1]]), b"123"), "the message ends before"),
        (raw(header(["a", "float32", [1]]), b"12345"), "1 bytes that no entry names"),
        (raw(header(["a", "uint8", [1]], ["a", "uint8", [1]]), b"12"), "comes twice"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(PacketError, match=reason):
        Packet.from_bytes(data)


def test_a_message_above_its_limit_is_not_looked_at() -> None:
    with pytest.raises(PacketError, match="4 bytes, more than the 3 expected"):
        Packet.from_bytes(b"1234", limit=3)


def test_plain_values_must_be_of_their_type() -> None:
    packet = Packet("k", {"count": True, "name": "x"})
    packet.require({"name": str})
    with pytest.raises(PacketError, match="'count' of k is a bool"):
        packet.require({"count": int})
    with pytest.raises(PacketError, match="k lacks 'other'"):
        packet.require({"other": int})


UPLOAD = {"model": {"w": torch.zeros(2, 3), "n": torch.zeros(2, dtype=torch.int64)}, "none": {}}


def uploaded(**changes: Any) -> Packet:
    writer = Writer()
    writer.add_tree(UPLOAD, "upload")
    writer.arrays |= changes
    return writer.packet("k", {})


def test_an_upload_must_have_exactly_its_form() -> None:
    form = form_of(UPLOAD, "upload")
    assert form_nbytes(form) == 3 * 4 + 8
    assert read_form(uploaded(), "upload", form, 2)["none"] == {}
    w = "upload/model/w"
    for array, reason in (
        (np.zeros((2, 4), np.float32), r"float32 \(2, 4\), not float32 \(2, 3\)"),
        (np.zeros((3, 3), np.float32), r"float32 \(3, 3\), not"),
        (np.zeros((2, 3), np.float64), r"float64 \(2, 3\), not"),
        (np.zeros((2, 3), np.float16), r"float16 \(2, 3\), not"),
    ):
        with pytest.raises(PacketError, match=reason):
            read_form(uploaded(**{w: array}), "upload", form, 2)
    with pytest.raises(PacketError, match="unknown entry 'upload/evil'"):
        read_form(uploaded(**{"upload/evil": np.zeros(2)}), "upload", form, 2)
    with pytest.raises(PacketError, match="unknown entry 'evil'"):
        read_form(uploaded(evil=np.zeros(2)), "upload", form, 2)
    lacking = uploaded()
    del lacking.arrays[w]
    with pytest.raises(PacketError, match="entry 'upload/model/w' is missing"):
        read_form(lacking, "upload", form, 2)


@pytest.mark.parametrize("values", [None, 1.0, [1.0], [1.0, "2"], [1.0, True], [1.0, 1e13]])
def test_numbers_are_one_for_each_client_and_bounded(values: Any) -> None:
    with pytest.raises(PacketError, match="'loss'"):
        read_numbers(values, 2, "loss", 1e12)


def test_missing_numbers_are_nan_and_huge_integers_are_no_floats() -> None:
    found = read_numbers([1, float("nan")], 2, "loss", 1e12)
    assert found[0] == 1.0
    assert found[1] != found[1]
    with pytest.raises(PacketError, match="not within"):
        read_numbers([10**400], 1, "loss", 1e12)


@pytest.mark.parametrize("values", [None, [1], [1, -1], [1, 3], [1, 1.0], [1, True]])
def test_counts_are_within_what_was_enrolled(values: Any) -> None:
    limits = {"a": 5, "b": 2}
    assert read_counts([5, 2], limits, "counts") == [5, 2]
    with pytest.raises(PacketError, match="'counts'"):
        read_counts(values, limits, "counts")
