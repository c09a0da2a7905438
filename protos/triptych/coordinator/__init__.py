"""The coordinator area of the contract."""
