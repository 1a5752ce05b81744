"""Engines that run the clients' work: ``sequential`` for reference, ``vectorized`` for speed."""
