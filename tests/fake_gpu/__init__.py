"""A GPU made of CPU memory, for what a machine without one can test of the code that needs one."""
