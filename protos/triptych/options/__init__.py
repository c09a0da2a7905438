"""The options area of the contract."""
