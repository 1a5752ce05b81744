"""Python's instructions: those of a function, and what one of a name may do.

In Python 3.10 to 3.15; ``CONTRIBUTING.md`` says what was run with which.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

COMPUTING = (
    *("BINARY_", "INPLACE_", "UNARY_", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "TO_BOOL", "CALL"),
    *("BUILD_", "LIST_", "SET_ADD", "SET_UPDATE", "MAP_ADD", "DICT_", "UNPACK_", "FORMAT_"),
    *("CONVERT_VALUE", "MATCH_KEYS", "MATCH_MAPPING", "MATCH_SEQUENCE", "STORE_SUBSCR"),
    *("STORE_SLICE", "DELETE_SUBSCR", "KW_NAMES", "MAKE_", "SET_FUNCTION_ATTRIBUTE"),
    *("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF"),
    *("LOAD_CLOSURE", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"),
    *("COPY", "SWAP", "ROT_", "DUP_", "POP_", "PUSH_EXC_INFO", "JUMP_ABSOLUTE", "JUMP_BACKWARD"),
    *("JUMP_FORWARD", "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP", "FOR_ITER", "END_FOR"),
    *("GET_ITER", "GET_LEN", "GET_YIELD_FROM_ITER", "YIELD_", "GEN_START", "SEND", "END_SEND"),
    *("RETURN_", "LOAD_ASSERTION_ERROR", "RAISE_VARARGS", "RERAISE", "CLEANUP_THROW"),
    *("SETUP_WITH", "BEFORE_WITH", "LOAD_SPECIAL", "WITH_EXCEPT_START"),
)
"""How instructions begin that read and change locals and values at hand alone, in Python 3.10 to
3.15. Any other may change, read or catch something: attributes, globals, imports, classes, errors.
"""
WRITING = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR", "INPLACE_")
"""How instructions begin that may change a list, a dict or an object that they are given."""
IN_PLACE = range(13, 26)
"""Arguments of ``BINARY_OP`` that stand for ``+=`` and the like."""
MUTATORS = frozenset(
    {
        *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "sort", "reverse"),
        *("update", "setdefault"),
    }
)
"""Attributes by which code changes a list or a dict."""
SILENT = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "RESUME", "PRECALL", "PUSH_NULL", "NOT_TAKEN"})
GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
ASKS = "ASKS"
"""In the place of the instruction that reads ``getattr`` or ``hasattr``, where it asks for an
attribute by a name that stands there: that is in the place of the name."""
ASKING = frozenset({"getattr", "hasattr"})
VALUES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CONST", "LOAD_SMALL_INT")
"""How instructions begin by which a value is at hand that stands there or is a local."""


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Iterate over the code of a function and of those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


@cache
def instructions(code: CodeType) -> list[tuple[str, Any]]:
    """Return the names of a code's instructions, with their arguments.

    Of code that catches errors it is one alone, which isn't among :data:`COMPUTING`.
    """
    found = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    names = [name for name, _ in found]
    # A `with` has a handler of its own, which goes on with the error unless the context says no.
    if names.count("PUSH_EXC_INFO") > names.count("WITH_EXCEPT_START"):
        return [("SETUP_FINALLY", None)]
    found = [one for one in found if one[0] not in SILENT]
    for at, name in _asked(found).items():
        found[at], found[name] = (ASKS, found[at][1]), ("LOAD_ATTR", found[name][1])
    return found


def _asked(code: list[tuple[str, Any]]) -> dict[int, int]:
    """Return where code calls ``getattr`` or ``hasattr``, with where the attribute's name stands.

    Those are left out that have it from elsewhere.
    """
    found = {}
    for at, (kind, function) in enumerate(code):
        if kind not in GLOBALS or function not in ASKING:
            continue
        if (name := _after_value(code, at + 1)) > at + 1 and names_alone(code, name, 1):
            found[at] = name
    return found


def names_alone(code: list[tuple[str, Any]], at: int, before: int) -> bool:
    """Whether a text that stands there is an argument of the call behind it, as it is.

    Args:
        code: Instructions.
        at: The text's position.
        before: How many arguments are before it. There may be another one behind it.
    """
    kind, text = code[at]
    if kind != "LOAD_CONST" or not isinstance(text, str):
        return False
    end = _after_value(code, at + 1)
    kind, count = code[end]
    return kind.startswith("CALL") and count == before + 1 + (end > at + 1)


def _after_value(code: list[tuple[str, Any]], at: int) -> int:
    """Return the position behind a local, a constant or an attribute of it; else the same."""
    if code[at][0].startswith(VALUES):
        at += 1
        while code[at][0] in ATTRIBUTES:
            at += 1
    return at


@cache
def read_of_first(code: CodeType) -> frozenset[str]:
    """Return the names of attributes that code reads of its first argument and of nothing else."""
    if not code.co_argcount:
        return frozenset()
    first, found, others, is_next = code.co_varnames[0], set[str](), set[str](), False
    every = [one for one in dis.get_instructions(code) if one.opname not in SILENT]
    names = _asked([(one.opname, one.argval) for one in every]).values()
    asked = {every[at].offset for at in names}
    for one in dis.get_instructions(code):
        # Python 3.13 and later have instructions for two locals, of which the second is on top.
        locals_ = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        written = locals_[:1] if "LOAD_FAST" in one.opname else locals_  # STORE_FAST_LOAD_FAST
        if one.opname.startswith(("STORE_FAST", "DELETE_FAST")) and first in written:
            return frozenset()
        if one.opname in ATTRIBUTES or one.offset in asked:
            # A jump to it may come with another object.
            (found if is_next and not one.is_jump_target else others).add(one.argval)
        is_next = "LOAD_FAST" in one.opname and locals_[-1] == first
    return frozenset(found - others)


def may_write(kind: str, name: Any) -> bool:
    """Whether an instruction may change a list, a dict or an object that is at hand."""
    in_place = kind == "BINARY_OP" and name in IN_PLACE
    return in_place or kind.startswith(WRITING) or (kind in ATTRIBUTES and name in MUTATORS)
