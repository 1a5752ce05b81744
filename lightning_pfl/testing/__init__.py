"""Problems, quiet runs and the conformance suite, for tests of methods."""

import sys

if "pytest" in sys.modules:  # failed checks then show the values that they compare
    for _name in ("conformance", "fitting", "rounds"):
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{_name}")

from lightning_pfl.testing.conformance import CHECKS, Problem
from lightning_pfl.testing.fitting import (
    Fit,
    Recorder,
    fit,
    quiet,
)
from lightning_pfl.testing.quadratic import (
    QuadraticModule,
    descend,
    q2,
    quadratic_clients,
)
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_trees_close,
    assert_trees_equal,
    local_round,
)

__all__ = [
    "QuadraticModule",
    "quadratic_clients",
    "q2",
    "descend",
    "fit",
    "Fit",
    "Recorder",
    "quiet",
    "local_round",
    "LocalRound",
    "assert_trees_close",
    "assert_trees_equal",
    "CHECKS",
    "Problem",
]
