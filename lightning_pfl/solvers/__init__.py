"""Mathematics shared by two or more methods."""
