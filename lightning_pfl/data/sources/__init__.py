"""Sources of federated data."""
