"""``python -m lightning_pfl`` is the console script ``lightning-pfl``."""

from lightning_pfl.cli import main

main()
