"""Two engines for the clients' work.

``sequential`` is the twin to read, ``vectorized`` the twin to run.
"""
