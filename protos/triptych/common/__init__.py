"""The common area of the contract."""
