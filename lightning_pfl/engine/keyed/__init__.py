"""torch's random functions under a client's key."""
