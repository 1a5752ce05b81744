"""A federation between rounds: server, clients' memories, and who does what in a round."""
