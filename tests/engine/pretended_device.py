"""A device for tests on machines without one: its tensors hold ordinary ones, and don't mix.

What goes wrong on an accelerator alone is mostly two things: an operator gets tensors of two
devices, or the program waits for the device in every step. Both show here. Operators run on the
CPU, so the numbers are the CPU's; an operator that an accelerator would refuse, as it gets a tensor
from outside, is refused, and every copy or number that the host asks for is counted.

It stands on torch's experimental backends written in Python. `tests/conftest.py` registers it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretended"
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
            device=torch.device("meta"),
            dispatch_device=True,
            dispatch_sizes_strides_policy="sizes",
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Outside the mode tensors of the device behave alike, but nobody counts."""
        return run(func, args, kwargs or {}, Counter())

    def data_ptr(self) -> int:
        """Where the held tensor lies: views of one tensor have one address."""
        return self.held.data_ptr()

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
        waits: How often the host waited for the device, by operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator where it belongs."""
        return run(func, args, kwargs or {}, self.waits)

    def __enter__(self) -> PretendedDevice:
        """Begin; ``torch.tensor(device=...)`` makes its tensor on the CPU, then moves it."""
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def run(func: Any, args: Any, kwargs: dict[str, Any], waits: Counter[str]) -> Any:
    """Run an operator on the CPU, and put its result where an accelerator would."""
    if func is torch.ops.prim.device.default:
        return torch.device(NAME, 0)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [isinstance(tensor, OnDevice) for tensor in tensors]
    require_one_device(func, tensors, here)
    to_device = any(here)
    if func in (*BETWEEN_DEVICES, *INDEXING):
        to_device = here[0]
    if kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if any(here) and (func in NUMBERS or not to_device):
        waits[func.name()] += 1
    given, named = tree_map(inner, args), tree_map(inner, kwargs)
    result = func(*given, **named)
    if isinstance(result, Tensor):  # in place, or into `out=`: the caller's own tensor
        originals = zip((*args, *kwargs.values()), (*given, *named.values()), strict=True)
        for original, held in originals:
            if result is held and isinstance(original, Tensor):
                return original
    return tree_map(outer, result) if to_device else result


def require_one_device(func: Any, tensors: list[Tensor], here: list[bool]) -> None:
    """Refuse what an accelerator refuses; a single number may come from the host."""
    if not any(here) or func in BETWEEN_DEVICES:
        return
    outside = [t for t, inside in zip(tensors, here, strict=True) if not inside and t.ndim > 0]
    if func in INDEXING:
        outside = [] if here[0] else tensors[:1]
    if outside:
        shapes = [tuple(tensor.shape) for tensor in outside]
        raise RuntimeError(f"{func.name()} got tensors of the host {shapes} beside the device's")


def inner(leaf: Any) -> Any:
    """The held tensor of a tensor of the device."""
    return leaf.held if isinstance(leaf, OnDevice) else leaf


def outer(leaf: Any) -> Any:
    """A result of the CPU as a tensor of the device."""
    return OnDevice(leaf) if isinstance(leaf, Tensor) else leaf


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
