"""A recorded step on tensors that stay where they are.

A step in which parameters, optimizer states and intermediate results always have the same memory
needs no new memory, and its views are made once. So a replay calls the operators that compute and
nothing else: of an MLP's 59 operators 30 are views.

- A view of tensors in place is made when the program is, and so is what is computed from constants.
- An operator writes to one of its arguments that isn't read again, if it does so entry by entry, or
  else to a buffer, which programs share and each uses again for what it computes later.
- Other operators, for example those without a variant that writes to a given tensor, make new ones.

The bits are those of the recorded step: the variants run the same kernels.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.engine.recording import (
    KEPT,
    Call,
    Recorder,
    called,
    compiled,
    evaluated,
    flatten,
    is_constant,
    is_random,
    layout,
    needed,
    same,
    source_of,
    written,
)

aten = torch.ops.aten
COPIES = (aten.clone.default, aten._to_copy.default)
EMPTY = (aten.empty_like.default, aten.new_empty.default, aten.empty.memory_format)


class Buffers:
    """Memory of a device that programs share; only one of them runs at a time.

    Args:
        largest: Largest number of entries of a tensor in it; None for any.
    """

    def __init__(self, largest: int | None = None) -> None:
        self._largest = largest
        self._free: dict[Any, list[Tensor]] = defaultdict(list)
        self._held: dict[str, tuple[Any, Tensor]] = {}

    def fit(self, like: Tensor) -> bool:
        """Whether a tensor of this shape may be in it."""
        return self._largest is None or like.numel() <= self._largest

    def take(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the same type, shape and strides, in memory that nothing else has."""
        entries = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        key = like.dtype, like.device, entries
        free = self._free[key]
        memory = free.pop() if free else torch.empty(entries, dtype=like.dtype, device=like.device)
        self._held[name] = key, memory
        return memory.as_strided(like.shape, like.stride())

    def hand_over(self, name: str, other: str) -> None:
        """Let another tensor have the memory of one."""
        if name in self._held:
            self._held[other] = self._held.pop(name)

    def give_back(self, name: str) -> None:
        """Let the memory of a tensor be taken again."""
        if name in self._held:
            key, memory = self._held.pop(name)
            self._free[key].append(memory)

    def holds(self, name: str) -> bool:
        """Whether a tensor is in this memory."""
        return name in self._held

    def count(self) -> int:
        """Count the pieces of memory."""
        return len(self._held) + sum(map(len, self._free.values()))

    def give_all_back(self) -> None:
        """End a program."""
        for name in list(self._held):
            self.give_back(name)


def compile_in_place(
    recorder: Recorder,
    given: Mapping[str, Tensor],
    targets: Sequence[tuple[str, Tensor]],
    result: Any,
    buffers: Buffers,
) -> Callable[..., Any]:
    """Write a program of recorded operators.

    Args:
        recorder: The recording; every tensor that it had as an argument is either in ``given``, or
            an argument of the program.
        given: Tensors that stay in place, by name.
        targets: Names of results, and for each the tensor in place that becomes it at the end.
        result: A tree of tensors of the recording, which the program returns in new memory.
        buffers: Memory that it may share with other programs.

    Returns:
        A function of the remaining arguments.
    """
    program = _Program(recorder, given, targets, result, buffers)
    differentiates = torch.is_grad_enabled()
    try:
        # Memory that is made in inference mode can't be written to outside of it.
        with torch.inference_mode(False), torch.set_grad_enabled(differentiates):
            return program.write()
    finally:
        buffers.give_all_back()


class _Program:
    """Writes one program; see :func:`compile_in_place`.

    Attributes:
        space: What the program reads, by name: tensors that stay in place, constants, operators.
        placed: Names of the tensors among them.
        constant: Names of those that never change.
    """

    def __init__(
        self,
        recorder: Recorder,
        given: Mapping[str, Tensor],
        targets: Sequence[tuple[str, Tensor]],
        result: Any,
        buffers: Buffers,
    ) -> None:
        self.recorder, self.buffers, self.result = recorder, buffers, result
        values: list[Tensor] = []
        flatten(result, values)
        self.tensors, self.roots = dict(recorder.tensors), recorder.roots
        self.changed = recorder.written()
        self.results = [recorder.name(value) for value in values]
        if targets:  # then results are what a step logs, to which nobody writes
            self.results = list(map(self._source, self.results))
        self.targets: dict[str, list[Tensor]] = {}
        for name, target in targets:
            if given.get(name) is not target:
                self.targets.setdefault(name, []).append(target)
        self.space: dict[str, Any] = {**recorder.constants, **given}
        self.arguments = [name for name in recorder.arguments if name not in given]
        wanted = [*(name for name, _ in targets), *self.results]
        self.calls = needed(map(recorder.at_once, recorder.calls), wanted)
        # With tensors of the module that no argument has; the user may change their numbers.
        self.placed = {*given, *(name for name in recorder.constants if name in self.tensors)}
        self.constant: set[str] = set()
        self.escaping = {self.roots[name] for name in self.results}
        self.last = self._last_uses(wanted)
        self.last_read = {name: n for n, call in enumerate(self.calls) for name in call.reads}
        self.lines: list[str] = []

    def _source(self, name: str) -> str:
        """Return the tensor of which another is a copy, if it lies alike and stays as it is."""
        for call in self.recorder.calls:
            if call.operator is COPIES[0] and call.makes[0] == name:
                (source,) = call.reads
                alike = layout(self.recorder.tensors[source]) == layout(self.tensors[name])
                return source if alike and self.roots[source] not in self.changed else name
        return name

    def _last_uses(self, wanted: Sequence[str]) -> dict[str, int]:
        """Return for each memory the number of the last call that reads or writes it."""
        last: dict[str, int] = {}
        for number, call in enumerate(self.calls):
            for name in (*call.reads, *call.makes):
                if name != "_":
                    last[self.roots[name]] = number
        for name in wanted:
            last[self.roots[name]] = len(self.calls)
        return last

    def write(self) -> Callable[..., Any]:
        """Write the program."""
        for number, call in enumerate(self.calls):
            if not self._is_made_once(number, call):
                self._add(number, call)
            for root in {self.roots[name] for name in (*call.reads, *call.makes) if name != "_"}:
                if self.last[root] <= number:
                    self.buffers.give_back(root)
        results = [self._in_new_memory(name) for name in self.results]
        self._copy_to_targets()
        result = source_of(self.result, iter(results), self.space)
        return compiled(written(self.arguments, self.lines, result), self.space)

    def _is_made_once(self, number: int, call: Call) -> bool:
        """Make what no replay changes: constants, and views of what stays in place."""
        if call.writes or call.several:
            return False
        name = call.makes[0]
        root = self.roots[name]
        fresh = root == name and root not in self.changed and root not in self.escaping
        known = is_constant(call, self.tensors) or (call.reads and call.reads <= self.constant)
        if fresh and known and not is_random(call.operator):
            self._place(name, self.tensors[name].detach())
            self.constant.add(name)
            return True
        if call.operator in EMPTY and root not in self.escaping:
            like = self.tensors[name]
            free = self._free_target(name, number, call)
            if free is None and not self.buffers.fit(like):
                return False
            self._place(name, self.buffers.take(name, like) if free is None else free)
            return True
        if root != name and call.reads <= self.placed:
            self._place(name, evaluated(call.operator, call.text, self.space))
            if call.reads <= self.constant:
                self.constant.add(name)
            return True
        return False

    def _place(self, name: str, tensor: Tensor) -> None:
        self.space[name] = tensor
        self.placed.add(name)

    def _add(self, number: int, call: Call) -> None:
        """Add a line for an operator that runs in every replay."""
        name = call.makes[0] if len(call.makes) == 1 and not call.several else "_"
        own = name != "_" and self.roots[name] == name and name not in self.escaping
        if not (own and not call.writes and self._writes_to_given(number, call, name)):
            made = "".join(f"{one}, " for one in call.makes) if call.several else name
            self._line(call.operator, call.text, made)
        # Dynamic tensors that nothing reads again, so that their memory is free.
        gone = sorted(
            one
            for one in (*call.reads, *call.makes)
            if one.startswith("v")
            and one not in self.placed
            and self.last_read.get(one, number) <= number
            and one not in (*self.targets, *self.results)
        )
        if gone:
            self.lines[-1] += f"; del {', '.join(dict.fromkeys(gone))}"

    def _writes_to_given(self, number: int, call: Call, name: str) -> bool:
        """Let an operator write to memory that is there; whether it has a variant that does."""
        like = self.tensors[name]
        if like.storage_offset() or not _is_dense(like):
            return False
        operator = call.operator
        variant, argument = out_variant(operator)
        if not like.ndim and any(one.name == "reduction" for one in operator._schema.arguments):
            # Losses write one entry for each sample there before they reduce them.
            variant = None
        target = self._free_target(name, number, call)
        if variant is not None and target is not None:
            self._place(name, target)
            self._line(variant, f"{call.text}, {argument}={name}", "_")
            return True
        for old in self._dying(number, call, like):
            if variant is not None and old not in self.placed and like.numel() <= KEPT:
                continue  # views of a buffer are made once; larger ones don't stay in the cache
            changing = in_place_variant(operator)
            if changing is not None and call.text.split(", ")[0] == old:
                self._line(changing, call.text, "_" if old in self.placed else name)
            elif variant is not None:
                made = "_" if old in self.placed else name
                self._line(variant, f"{call.text}, {argument}={old}", made)
            else:
                continue
            if old in self.placed:
                self._place(name, self.space[old])
                self.buffers.hand_over(self.roots[old], name)
            return True
        if not self.buffers.fit(like):
            return False
        if operator in COPIES:
            self._line(aten.copy_.default, f"{name}, {call.text.split(', ')[0]}", "_")
        elif variant is not None:
            self._line(variant, f"{call.text}, {argument}={name}", "_")
        else:
            return False
        self._place(name, self.buffers.take(name, like))
        return True

    def _free_target(self, name: str, number: int, call: Call) -> Tensor | None:
        """Return where a result is to be in the end, if an operator can write it there."""
        like = self.tensors[name]
        found = self.targets.get(name, ())
        return next((one for one in found if self._is_free(one, number, call, like)), None)

    def _is_free(self, target: Tensor, number: int, call: Call, like: Tensor) -> bool:
        names = [name for name in self.recorder.arguments if self.space.get(name) is target]
        if layout(target) != layout(like):
            return False
        if not names:  # no operator reads it
            return True
        last = self.last.get(self.roots[names[0]], -1)
        mine = [name for name in call.reads if self.roots[name] == self.roots[names[0]]]
        return last < number or (last == number and self._by_entry(call, mine, like))

    def _by_entry(self, call: Call, names: list[str], like: Tensor) -> bool:
        """Whether an operator reads some tensors at the entry that it writes, and nowhere else."""
        pointwise = torch.Tag.pointwise in call.operator.tags
        return pointwise and all(layout(self.tensors[name]) == layout(like) for name in names)

    def _dying(self, number: int, call: Call, like: Tensor) -> list[str]:
        """Return the arguments whose memory an operator may write its result to."""
        found = []
        for name in sorted(call.reads):
            root = self.roots[name]
            mine = [one for one in call.reads if self.roots[one] == root]
            made_here = root.startswith("v") and root not in self.escaping
            owned = root not in self.placed or self.buffers.holds(root)
            if made_here and owned and self.last[root] <= number:
                found += [name] if self._by_entry(call, mine, like) else []
        return found

    def _line(
        self, operator: Any, text: str, made: str, also: Mapping[str, Tensor] | None = None
    ) -> None:
        function = f"f{len(self.lines)}"
        if operator is same:
            self.lines.append(f"{made} = {text.split(', ')[0]}")
            return
        self.space |= also or {}
        self.space[function] = called(operator, text, ChainMap(self.space, self.tensors))
        self.lines.append(f"{made} = {function}({text})" if made != "_" else f"{function}({text})")

    def _in_new_memory(self, name: str) -> str:
        """Copy a result that a later replay would change."""
        if name not in self.placed and not self.roots[name].startswith("a"):
            return name
        self._line(aten.clone.default, name, f"own_{name}")
        return f"own_{name}"

    def _copy_to_targets(self) -> None:
        """Copy what isn't yet where it is to be; what another copy changes is read before."""
        moved = [
            (name, target)
            for name, targets in self.targets.items()
            for target in targets
            if self.space.get(name) is not target
        ]
        read_first = {name for name, _ in moved if self.roots[name] in self.recorder.arguments}
        for name in sorted(read_first):
            self._line(aten.clone.default, name, f"new_{name}")
            self.tensors[f"new_{name}"] = self.tensors[name]
        for number, (name, target) in enumerate(moved):
            source = f"new_{name}" if name in read_first else name
            self._line(aten.copy_.default, f"t{number}, {source}", "_", {f"t{number}": target})


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a place of its own for each entry, and no others."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 1 + sum((n - 1) * s for n, s in sizes) and tensor.numel() > 0


@cache
def out_variant(operator: Any) -> tuple[Any, str]:
    """Return an operator's variant that writes to a given tensor, with the argument's name.

    Variants that torch generates run the operator and copy its result; they don't count. None if
    there is no other.
    """
    wanted = _signature(operator)
    for name in operator.overloadpacket.overloads():
        variant = getattr(operator.overloadpacket, name)
        outs = [argument.name for argument in variant._schema.arguments if argument.is_out]
        own = torch.Tag.generated not in variant.tags
        if own and len(outs) == 1 and _signature(variant) == wanted:
            return variant, outs[0]
    return None, ""


@cache
def in_place_variant(operator: Any) -> Any:
    """Return an operator's variant that changes its first argument; None if there is none."""
    if operator is aten.mul.Scalar:  # whose own one rounds the number to 16 bits before
        return aten.mul_.Tensor
    packet = getattr(aten, f"{operator.overloadpacket.__name__}_", None)
    if operator.namespace != "aten" or packet is None:
        return None
    variant = getattr(packet, operator._overloadname, None)
    if variant is None or _signature(variant) != _signature(operator):
        return None
    return None if torch.Tag.generated in variant.tags else variant


def _signature(operator: Any) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in operator._schema.arguments if not one.is_out]
