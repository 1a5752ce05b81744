r"""Formulas of docstrings as text for a terminal, such as ``mu >= 0`` for ``\mu \ge 0``."""

from __future__ import annotations

import re
from collections.abc import Iterator

SYMBOLS = {
    "Vert": "||",
    "approx": "~=",
    "cap": "and",
    "cdot": ".",
    "dots": "...",
    "ell": "l",
    "ge": ">=",
    "jmath": "j",
    "lVert": "||",
    "langle": "<",
    "le": "<=",
    "leftarrow": "<-",
    "lfloor": "floor(",
    "mid": "|",
    "nabla": "grad",
    "odot": "*",
    "partial": "d",
    "propto": "proportional to",
    "qquad": "\n",
    "quad": " ",
    "rVert": "||",
    "rangle": ">",
    "rfloor": ")",
    "sim": "~",
    "top": "T",
    "varepsilon": "epsilon",
    "varphi": "phi",
    ",": " ",
    ";": " ",
    "!": "",
    "|": "||",
    "\\": "\n",
}
"""LaTeX commands that aren't their own text, unlike ``\\lambda``."""
SIZES = re.compile(r"\\(?:[bB]igg?[lr]?|left|right|textstyle|displaystyle)(?![a-zA-Z])")
"""Commands that only say how large something is."""
FRACTIONS, ACCENTS = ("frac", "tfrac", "dfrac"), ("bar", "hat", "tilde")
ENCLOSING = {"text": "", "operatorname": "", "mathbb": "", "sqrt": "sqrt", "overline": "mean"}
"""Commands with an argument, and the name of the function that it becomes one of."""
BLOCK = re.compile(r"^\.\. math::\n((?:[ \t]*\n|[ \t]+.*(?:\n|\Z))+)", re.MULTILINE)
ROLE = re.compile(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`")


def plain(text: str) -> str:
    r"""Write formulas in ``:math:`` and blocks of them without LaTeX, and links as names.

    Example:
        >>> plain(r":math:`\mu \ge 0`. 0 is FedAvg.")
        'mu >= 0. 0 is FedAvg.'
    """
    text = BLOCK.sub(lambda block: _block(block[1]), text)
    text = re.sub(r":math:`([^`]*)`", lambda formula: _formula(formula[1]), text)
    return ROLE.sub(r"\1", text)


def _block(formulas: str) -> str:
    """Write a block of formulas, each in an indented line."""
    lines = _formula(" ".join(formulas.split())).split("\n")
    return "".join(f"    {line.strip()}\n" for line in lines) + "\n"


def _formula(tex: str) -> str:
    tokens = re.findall(r"\\[A-Za-z]+|\\.|\s+|.", SIZES.sub("", tex.replace("&", "")))
    text = re.sub(r"(?<=\S) {2,}", " ", _text(iter(tokens)))
    return re.sub(r"(?<=\() +(?=\S)|(?<=\S) +(?=[),;\]\n]|\Z)", "", text)


def _text(tokens: Iterator[str]) -> str:
    """Write the tokens up to a closing brace or the end."""
    found, joins = "", False
    for token in tokens:
        if token == "}":
            break
        if token in "^_":
            index = _argument(tokens)
            joins = not re.fullmatch(r"[A-Za-z0-9]+|\W", index)
            found += f"{token}({index})" if joins else token + index
            continue
        part, is_word = _part(token, tokens), token[0] == "\\" and token[1:].isalpha()
        # What LaTeX sets apart without a space.
        apart = joins or (is_word and found[-1:].isalnum())
        touches = found[-1:].isalnum() or found[-1:] == ")"
        found += f" {part}" if apart and touches and part[:1].isalnum() else part
        joins = is_word
    return found


def _part(token: str, tokens: Iterator[str]) -> str:
    """Write a token, with the arguments that it takes."""
    name = token[1:]
    if token == "{":
        return _text(tokens)
    if token[0] != "\\":
        return token
    if name in FRACTIONS:
        above, below = _argument(tokens), _argument(tokens)
        return f"{_factor(above)}/{_factor(below)} "
    if name in ACCENTS:
        return f"{name} {_argument(tokens)}"
    if name in ENCLOSING:
        inner = _argument(tokens)
        return f"{ENCLOSING[name]}({inner})" if ENCLOSING[name] else inner
    return SYMBOLS.get(name, name)


def _argument(tokens: Iterator[str]) -> str:
    token = next((one for one in tokens if one.strip()), "}")
    return _part(token, tokens)


def _factor(text: str) -> str:
    """Put a part of a fraction in parentheses, unless it is one number or name."""
    alone = re.fullmatch(r"\d+|[A-Za-z]\w*(\^\w)?|\|[^|]*\||\w+\([^()]*\)", text.strip())
    return text.strip() if alone else f"({text.strip()})"
