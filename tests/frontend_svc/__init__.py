"""Tests of the text service, mirroring its tree."""
