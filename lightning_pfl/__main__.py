"""``python -m lightning_pfl`` is the console script ``lightning-pfl``."""

from lightning_pfl.cli.command_line import main

main()
