"""The admin area of the contract."""
