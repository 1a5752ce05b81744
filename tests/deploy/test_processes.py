"""A SuperLink and three SuperNodes on 127.0.0.1, with TLS and keys, killed and started again."""

from __future__ import annotations

import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from tests.deploy.processes import Processes
from tests.deploy.setting import METHODS, recipe_of, simulate

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11")
NAMES = ("0", "1", "2")


@pytest.mark.slow
def test_one_round_equals_the_simulation_and_strangers_are_kept_out(tmp_path: Path) -> None:
    recipe = recipe_of("FedMAP", rounds=1, participation=1.0, clients=3, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES) as deployed:
        deployed.add_stranger()
        deployed.start("server", *NAMES, "stranger")
        deployed.until(lambda: "is here" in deployed.log)
        plain = HTTPConnection("127.0.0.1", deployed.port, timeout=60)
        plain.request("GET", "/")
        with pytest.raises((HTTPException, ConnectionError)):  # TLS ends what is plain text
            plain.getresponse()
        link = deployed.folder / "server" / "run" / "flower" / "superlink.log"
        refusal = "No SuperNode found with the given public key"
        stranger = deployed.folder / "stranger" / "state"
        deployed.until(lambda: "ended with" in (stranger.parent / "out.txt").read_text())
        deployed.finish()
        assert refusal in link.read_text()
        assert not list(stranger.glob("*/join.bin"))
        assert deployed.differences(simulated.strategy.federation) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_five_rounds_equal_the_simulation(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method, participation=0.7, clients=3, check_val_every_n_epoch=5)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES) as deployed:
        deployed.start("server", *NAMES)
        deployed.finish()
        assert deployed.differences(simulated.strategy.federation) == []


@pytest.mark.slow
@pytest.mark.kill
def test_kills_change_no_bit(tmp_path: Path) -> None:
    recipe = recipe_of("SCAFFOLD", participation=1.0, clients=3, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES) as deployed:
        deployed.start("server", *NAMES)
        deployed.until(lambda: "Round 1 of" in deployed.log)
        deployed.kill("1")  # in the middle of the next round
        deployed.start("1")
        deployed.until(lambda: "Round 2 of" in deployed.log)
        deployed.kill("server")
        deployed.start("server")
        deployed.until(lambda: "Round 3 of" in deployed.log)
        deployed.kill(*NAMES)
        deployed.start(*NAMES)
        deployed.finish()
        assert "Resuming from the last checkpoint." in deployed.log
        assert deployed.differences(simulated.strategy.federation) == []
