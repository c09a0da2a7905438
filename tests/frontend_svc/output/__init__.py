"""Tests of `frontend_svc/output`."""
