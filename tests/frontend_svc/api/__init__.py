"""Tests of `frontend_svc/api`."""
