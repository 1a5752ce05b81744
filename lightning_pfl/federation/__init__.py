"""A federation between rounds: server, client states and the clients' tasks in a round."""
