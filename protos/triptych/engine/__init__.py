"""The engine area of the contract."""
