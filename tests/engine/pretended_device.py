"""A device for tests on machines without one: its tensors hold ordinary ones, and don't mix.

What goes wrong on an accelerator alone is mostly two things: an operator gets tensors of two
devices, or the program waits for the device in every step. Both show here. Operators run on the
CPU, so the numbers are the CPU's; an operator that an accelerator would refuse, as it gets a tensor
from outside, is refused, every copy or number for which the host waits is counted, and so is every
operator that would launch a kernel. A copy to the host for which it doesn't wait has no numbers
until an event after it has.

It stands on torch's experimental backends written in Python. `tests/conftest.py` registers it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import lightning_pfl
from lightning_pfl.core.transfer import EVENTS

NAME = "pretended"
PACKAGE = str(Path(lightning_pfl.__file__).parent)
aten = torch.ops.aten
BETWEEN_DEVICES = (aten.copy_.default, aten._to_copy.default)
"""Operators that take tensors of two devices."""
INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
"""Operators whose positions may lie on the host; those on the device index only what is there."""
NUMBERS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
"""Operators whose result the host waits for."""
WITHOUT_KERNEL = (
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
"""Operators that compute nothing, besides those that torch declares as views."""


class OnDevice(Tensor):
    """A tensor of the device, around one of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[OnDevice], held: Tensor) -> OnDevice:
        """Wrap a tensor of the CPU."""
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Outside the mode tensors of the device behave alike, but nobody counts."""
        return run(func, args, kwargs or {}, PretendedDevice())

    def data_ptr(self) -> int:
        """Where the held tensor lies: views of one tensor have one address."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the held tensor, which views have in common."""
        return self.held.untyped_storage()

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A copy with memory of its own."""
        copied = OnDevice(self.held.detach().clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        """The numbers, which torch gives no subclass."""
        return self.cpu().tolist()


class PretendedDevice(TorchDispatchMode):
    """While active, tensors can be made on, and moved to, the device.

    Attributes:
        waits: How often the host waited for the device, by operator. A copy waits for all that was
            launched before it, unless it's told not to, and so do positions by a mask.
        sent: How often it waited for a copy from the host, by place in the package.
        arriving: Copies to the host that have no numbers yet, with these.
        launches: How often an operator ran there, by operator. On an accelerator that is a kernel
            each, or a few: a convolution's gradient has two products.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.tape: Tape | None = None
        self.arriving: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator where it belongs."""
        return run(func, args, kwargs or {}, self)

    def __enter__(self) -> PretendedDevice:
        """Begin; ``torch.tensor(device=...)`` makes its tensor on the CPU, then moves it."""
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        PretendedCapture.current = self
        EVENTS[NAME] = PretendedEvent
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        del EVENTS[NAME]
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def run(func: Any, args: Any, kwargs: dict[str, Any], device: PretendedDevice) -> Any:
    """Run an operator on the CPU, and put its result where an accelerator would."""
    tensors = tensors_of((args, kwargs))
    here = [isinstance(tensor, OnDevice) for tensor in tensors]
    require_one_device(func, tensors, here)
    to_device = any(here)
    if func in (*BETWEEN_DEVICES, *INDEXING):
        to_device = here[0]
    if kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    from_host = func in BETWEEN_DEVICES and to_device and not all(here)
    waits = (any(here) and (func in NUMBERS or not to_device)) or from_host or by_mask(func, args)
    at_once = func in BETWEEN_DEVICES and is_at_once(args, kwargs)
    if waits and not at_once:
        device.waits[func.name()] += 1
        if from_host:
            device.sent[place_in_package()] += 1
    on_device = any(here) or to_device
    if on_device and not (func.is_view or func in WITHOUT_KERNEL):
        device.launches[func.name()] += 1
    given, named = tree_map(inner, args), tree_map(inner, kwargs)
    if on_device and device.tape is not None:
        if waits and not (from_host and tensors[-1].ndim == 0):
            raise RuntimeError(f"{func.name()} isn't permitted while a stream is captured")
        result = device.tape.run(func, given, named)
    else:
        result = func(*given, **named)
    if isinstance(result, Tensor):  # in place, or into `out=`: the caller's own tensor
        originals = zip((*args, *kwargs.values()), (*given, *named.values()), strict=True)
        for original, held in originals:
            if result is held and isinstance(original, Tensor):
                return original
    if at_once and any(here) and not to_device:
        device.arriving.append((result, result.clone()))
        return result.fill_(torch.nan if result.is_floating_point() else 0)
    return tree_map(outer, result) if to_device else result


def require_one_device(func: Any, tensors: list[Tensor], here: list[bool]) -> None:
    """Refuse what an accelerator refuses; most operators take single numbers of the host."""
    if not any(here) or func in BETWEEN_DEVICES:
        return
    least = 0 if func.name().startswith("aten::_fused_") else 1
    outside = [t for t, inside in zip(tensors, here, strict=True) if not inside and t.ndim >= least]
    if func in INDEXING:
        outside = [] if here[0] else tensors[:1]
    if outside:
        shapes = [tuple(tensor.shape) for tensor in outside]
        raise RuntimeError(f"{func.name()} got tensors of the host {shapes} beside the device's")


def place_in_package() -> str:
    """Return the innermost line of the package that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_at_once(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a copy was told not to wait."""
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def by_mask(func: Any, args: Any) -> bool:
    """Whether an operator looks for the true entries of a mask that is on the device.

    To put one number of the host there, torch fills the mask in the place of looking.
    """
    if func not in INDEXING or (func is not aten.index.Tensor and is_number(args[2])):
        return False
    masks = (torch.bool, torch.uint8)
    return any(isinstance(at, OnDevice) and at.dtype in masks for at in tensors_of(args[1]))


def is_number(value: Tensor) -> bool:
    """Whether a tensor is one number, which torch leaves on the host for CUDA, but not here."""
    return value.ndim == 0


def inner(leaf: Any) -> Any:
    """The held tensor of a tensor of the device."""
    return leaf.held if isinstance(leaf, OnDevice) else leaf


def outer(leaf: Any) -> Any:
    """A result of the CPU as a tensor of the device."""
    return OnDevice(leaf) if isinstance(leaf, Tensor) else leaf


# --- graphs ---


class Tape:
    """The operators that were captured, with the memory that they had.

    As in a CUDA graph, nothing runs while it is captured: what results hold then is undefined, here
    NaN. A replay runs them again, with the same addresses and numbers.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator and take note of it."""
        for tensor in changed(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in (*self.made, *self.before):
                self.before[storage.data_ptr()] = storage, storage.clone()
        known = set(map(memory, tensors_of((args, kwargs))))
        result = func(*args, **kwargs)
        results = tensors_of(result)
        self.made |= {memory(leaf): leaf for leaf in results if memory(leaf) not in known}
        self.calls.append((func, args, kwargs, results))
        return result

    def end(self) -> None:
        """End the capture: restore what was there, and forget what was computed."""
        for storage, old in self.before.values():
            storage.copy_(old)
        for result in self.made.values():
            if result.is_floating_point():
                result.fill_(torch.nan)

    def replay(self) -> None:
        """Run the operators again."""
        for func, args, kwargs, results in self.calls:
            again = tensors_of(func(*args, **kwargs))
            for old, new in zip(results, again, strict=True):
                if memory(old) != memory(new):
                    old.copy_(new)


def changed(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        # BatchNorm's operators don't say that they write to their running statistics.
        statistics = argument.name in ("running_mean", "running_var")
        if statistics or (argument.alias_info is not None and argument.alias_info.is_write):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            found += tensors_of(given)
    return found


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    """Return the address of the memory that views have in common."""
    return tensor.untyped_storage().data_ptr()


class PretendedEvent:
    """Says that copies to the host have come; in the place of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Stand after the copies that were begun so far."""
        device = PretendedCapture.current
        self.copies, device.arriving = device.arriving, []

    def synchronize(self) -> None:
        """Wait for them."""
        PretendedCapture.current.waits["event"] += 1
        for copy, numbers in self.copies:
            copy.copy_(numbers)
        self.copies = []


class PretendedCapture:
    """Captures steps on the device; in the place of ``CudaCapture``."""

    current: PretendedDevice

    def __init__(self, device: torch.device) -> None:
        assert device.type == NAME

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Run a function."""
        return function()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run a function and take note of its operators; then it is as if it hadn't run."""
        device, tape = self.current, Tape()
        launched = device.launches.copy()
        device.tape = tape
        try:
            result = function()
        finally:
            device.tape = None
            tape.end()
            device.launches = launched

        def replay() -> None:
            device.launches["graph"] += 1
            tape.replay()

        return replay, result


class Backend:
    """What torch asks of a device's module."""

    def is_initialized(self) -> bool:
        """There is nothing to start."""
        return True

    def is_available(self) -> bool:
        """Nobody shall choose it unasked."""
        return False

    def device_count(self) -> int:
        """The one device."""
        return 1

    def current_device(self) -> int:
        """The one device."""
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """There is no generator of the device's own."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Half precision that autocast may choose."""
        return [torch.bfloat16, torch.float16]


class PretendedAccelerator(CPUAccelerator):
    """Lightning's way to the device."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to set up."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The one device."""
        return [torch.device(NAME, 0)]


def register() -> None:
    """Make torch know the device, where torch can and no real one is at hand.

    Before the first backward pass of the process: then autograd counts the devices, once.
    """
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is not None and not torch.cuda.is_available():
        setup(NAME, backend_module=Backend())


def pretended_accelerator() -> Accelerator:
    """Lightning's way to the device; skips the test where torch doesn't know it."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        pytest.skip("this torch has no backends written in Python, or there is a real device")
    return PretendedAccelerator()
