"""Programs for the development of this project. Not installed."""
