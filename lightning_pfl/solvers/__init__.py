"""Mathematics that several methods use: proximal steps, duals, projections, sheaves."""
