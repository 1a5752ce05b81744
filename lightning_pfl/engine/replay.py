"""Recorded functions of trees of tensors, which run again on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.engine.in_place import Buffers, compile_in_place
from lightning_pfl.engine.recording import Recorder

Function = Callable[..., Any]


class Recording:
    """The operators of one call, on other tensors of the same shapes.

    Args:
        replay: The operators, as a function of the arguments' tensors.
    """

    def __init__(self, replay: Function) -> None:
        self.replay = replay
        self._differentiates = torch.is_grad_enabled()

    def __call__(self, leaves: list[Tensor]) -> Any:
        """Run the operators on other tensors of the same shapes."""
        # As when they were recorded: some operators keep more for a backward pass.
        with torch.set_grad_enabled(self._differentiates):
            return self.replay(*leaves)


def record(
    function: Function, args: Any, leaves: list[Tensor], buffers: Buffers
) -> tuple[Any, Recording]:
    """Run a function and record its operators.

    Args:
        function: Returns a tree of tensors.
        args: Trees of tensors.
        leaves: Their tensors, in order.
        buffers: Memory for what is computed in between, which recordings may share.

    Returns:
        The function's result, and the recording, whose results are in new memory.

    Raises:
        NotRecordableError: If a number or a shape is made of a tensor, on which the rest may
            depend, or a tensor is written to that the function hasn't made and isn't given.
    """
    recorder = Recorder(leaves)
    with recorder.recording():
        result = function(*args)
    return result, Recording(compile_in_place(recorder, {}, [], result, buffers))
