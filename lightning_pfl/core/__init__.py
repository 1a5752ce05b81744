"""Tree arithmetic, parameter splits, random keys and errors, used by all other packages."""
