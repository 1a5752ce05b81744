"""Deploy a recipe: the server and every client on machines of their own, over Flower."""
