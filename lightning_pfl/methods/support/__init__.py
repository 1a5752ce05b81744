"""What several methods use beside the contract."""
