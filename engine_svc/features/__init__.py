"""Optional features of an engine, one file each. Only `build/` imports them."""
