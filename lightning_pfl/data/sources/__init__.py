"""Where data come from."""
