"""Events of what enters and leaves the prefix cache."""
