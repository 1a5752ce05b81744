"""A recipe's objects on a server that has no data, and on a node that has only its own."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_pfl.cli import PFLCLI

LOCAL_FLAGS = (
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
)
"""Flags of the Trainer that change local training."""


def load(path: str | Path) -> dict[str, Any]:
    """Read a YAML file as plain values.

    Raises:
        ValueError: If it isn't YAML, or holds something else than settings by name.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"Expected {str(path)!r} to be YAML, but {error}. Mend it.") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"Expected {str(path)!r} to hold settings by name, but got a {type(found).__name__}. "
            "Write `name: value` lines."
        )
    return found


def make(recipe: Mapping[str, Any], strategy: str, seed: int, **trainer: Any) -> PFLCLI:
    """Make the objects of a recipe; nothing runs.

    Args:
        recipe: The recipe, as plain values.
        strategy: Import path of the strategy in the place of ``FederatedStrategy``.
        seed: Seed of the federation.
        **trainer: Flags of the Trainer in the place of the recipe's.

    Raises:
        ValueError: If the recipe names another strategy.
    """
    flags = {**recipe.get("trainer", {}), **trainer}
    given = flags.get("strategy") or {}
    named = given if isinstance(given, str) else str(given.get("class_path", "FederatedStrategy"))
    if named.rsplit(".", 1)[-1] not in ("FederatedStrategy", "federated"):
        raise ValueError(
            f"Expected `trainer.strategy` to be FederatedStrategy, but got {named!r}. "
            "A deployment runs federated recipes alone."
        )
    settings = {} if isinstance(given, str) else given.get("init_args", {})
    flags["strategy"] = {"class_path": strategy, "init_args": {**settings, "seed": seed}}
    known = {name: value for name, value in recipe.items() if name not in ("trainer", "ckpt_path")}
    return PFLCLI({**known, "trainer": flags}, run=False, save_config_callback=None)


def choose_seed(recipe: Mapping[str, Any]) -> int:
    """Choose the seed of a federation: the strategy's, that of the recipe, or a drawn one."""
    strategy = recipe.get("trainer", {}).get("strategy", {})
    settings = {} if isinstance(strategy, str) else strategy.get("init_args", {})
    for seed in (settings.get("seed"), recipe.get("seed_everything", 0)):
        if isinstance(seed, int) and not isinstance(seed, bool):
            return seed
    return secrets.randbits(31)


def digest_sections(cli: PFLCLI) -> dict[str, str]:
    """Digest what server and nodes must agree on, by the section of the recipe."""
    config = json.loads(json.dumps(cli.config.as_dict(), default=str))
    flags = {name: config.get("trainer", {}).get(name) for name in LOCAL_FLAGS}
    parts = {"model": config.get("model"), "method": config.get("method"), "trainer": flags}
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]
        for name, part in parts.items()
    }
