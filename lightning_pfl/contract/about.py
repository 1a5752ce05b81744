"""What the tables of the documentation and the command line print about a method."""

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
"""The order of the tables."""


@dataclass(frozen=True, kw_only=True)
class About:
    r"""Describe a method in words, once for all tables.

    Each text is a cell of a Markdown table: one line, formulas between ``$``. Write what holds for
    this method without "the same as above", as a table may show the method alone. In formulas
    :math:`d` counts the model's trainable numbers, :math:`d_B` and :math:`d_H` those of backbone
    and head; bytes are for single precision, per client that takes part in a round.

    Args:
        family: Where the tables put the method.
        personal: What is personal, and in a few words how it comes about.
        assumes: What has to hold for the method to help.
        down: Bytes that a client receives in a round.
        up: Bytes that a client sends in a round.
        keeps: What a client keeps between rounds, and the server, if it is much.
        gradients: Gradients per minibatch, and other work of a client.
        personal_model: The model that a client is evaluated with.
        global_model: The one model for all that is evaluated too; None where there is none.
        paper: Authors and year, as in ``References:``; None where there is none.

    Raises:
        ValueError: If a text is empty, or can't be a cell of a table.
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
                    f"{field.name}={text!r}. Write what the tables should show."
                )

    @property
    def place(self) -> tuple[int, str]:
        """The place in tables: the family, then the year of the paper."""
        year = re.search(r"\d{4}", self.paper or "")
        return FAMILIES.index(self.family), year[0] if year else ""
