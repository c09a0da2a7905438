"""The published contract of triptych: one package an area and version."""
