"""Formats of quantized weights in safetensors folders: one file a format, one line each in `sources.FORMATS`.
Must not know architectures; but for `unpacking.py` nothing here imports torch at import time.
"""
