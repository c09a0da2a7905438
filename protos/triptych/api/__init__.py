"""The api area of the contract."""
