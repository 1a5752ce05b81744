"""Copies between the host and a device that wait for nothing that was launched before."""

import torch

from lightning_pfl.core.transfer import EVENTS, begin_copies, send
from tests.engine.pretended_device import NAME, PretendedDevice


def test_a_copy_from_the_host_waits_where_that_alone_is_safe(device: PretendedDevice) -> None:
    there = send(torch.arange(3), NAME)
    assert not device.waits
    assert there.device.type == NAME
    assert there.cpu().tolist() == [0, 1, 2]
    device.waits.clear()
    kind = EVENTS.pop(NAME)
    assert send(torch.arange(3), NAME, torch.float64).dtype == torch.float64
    EVENTS[NAME] = kind
    assert device.waits == {"aten::_to_copy": 1}


def test_a_copy_to_the_host_waits(device: PretendedDevice) -> None:
    there = send(torch.arange(3), NAME)
    assert send(there, "cpu").tolist() == [0, 1, 2]
    assert device.waits == {"aten::_to_copy": 1}


def test_copies_that_were_begun_have_no_numbers_until_they_are_read(
    device: PretendedDevice,
) -> None:
    numbers = send(torch.tensor([1.5, 2.5]), NAME)
    early = numbers.to("cpu", non_blocking=True)
    assert early.isnan().all()
    read = begin_copies([numbers, torch.tensor([3.0])])
    numbers.zero_()  # what is launched later comes later
    assert not device.waits
    assert [one.tolist() for one in read()] == [[1.5, 2.5], [3.0]]
    assert device.waits == {"event": 1}


def test_copies_of_a_device_without_events_are_made_when_they_are_read(
    device: PretendedDevice,
) -> None:
    numbers = send(torch.tensor([1.5]), NAME)
    kind = EVENTS.pop(NAME)
    read = begin_copies([numbers])
    EVENTS[NAME] = kind
    assert not device.waits
    assert read()[0].tolist() == [1.5]
    assert device.waits == {"aten::_to_copy": 1}


def test_copies_of_the_host_are_its_tensors() -> None:
    assert [one.tolist() for one in begin_copies([torch.tensor([2])])()] == [[2]]
    assert begin_copies([])() == []
