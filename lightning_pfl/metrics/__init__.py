"""Values per sample, summaries over clients and rounds, and distances between subspaces."""
