"""Families of models that take media, a file each. They know no wire and no process."""
