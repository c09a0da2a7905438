"""Transcripts of models, taken apart."""
