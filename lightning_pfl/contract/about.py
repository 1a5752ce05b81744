"""Descriptions of methods for tables in the documentation and on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal, get_args

from lightning_pfl.core.checks import check_choice

Family = Literal[
    "nothing shared",
    "one model for all",
    "a personal part",
    "a personal model",
    "clusters",
    "a graph",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""Families of methods, in the order of the tables."""


@dataclass(frozen=True, kw_only=True)
class About:
    r"""A method's cells in the tables of methods.

    Each text is a cell of a Markdown table: one line, formulas between ``$``, without reference to
    other methods. In formulas :math:`d` is the number of the model's trainable parameters,
    :math:`d_B` and :math:`d_H` those of backbone and head; bytes are for single precision, per
    participating client.

    Args:
        family: Family of the method, a section of the tables.
        personal: The personal part, and how it comes about.
        assumes: Assumption under which the method helps.
        down: Bytes that a client receives in a round.
        up: Bytes that a client sends in a round.
        keeps: State of a client between rounds, and of the server, if it is large.
        gradients: Gradients per minibatch, and other work of a client.
        personal_model: The model that a client is evaluated with.
        global_model: The global model that is evaluated too; None without one.
        paper: Authors and year, as in ``References:``; None without a paper.

    Raises:
        ValueError: If a text is empty or can't be a table's cell.
    """

    family: Family
    personal: str
    assumes: str
    down: str
    up: str
    keeps: str
    gradients: str
    personal_model: str
    global_model: str | None
    paper: str | None

    def __post_init__(self) -> None:
        """Require texts that fit into a cell."""
        check_choice("family", self.family, FAMILIES, "Choose one of them.")
        for field in fields(self):
            text = getattr(self, field.name)
            if text is None and field.name in ("global_model", "paper"):
                continue
            if not isinstance(text, str) or not text.strip() or set(text) & {"|", "\n"}:
                raise ValueError(
                    f"Expected `{field.name}` to be one line of text without '|', but got "
                    f"{field.name}={text!r}. Give the text of the table's cell."
                )

    @property
    def place(self) -> tuple[int, str]:
        """Sort key in tables: the family, then the paper's year."""
        year = re.search(r"\d{4}", self.paper or "")
        return FAMILIES.index(self.family), year[0] if year else ""
