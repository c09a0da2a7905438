"""What an engine can do beyond its core, one file each; only `build.py` imports them."""
