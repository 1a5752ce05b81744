"""torch's random functions with a key per client."""
