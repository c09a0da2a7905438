"""Clients in other languages, with the packages that their users have."""
