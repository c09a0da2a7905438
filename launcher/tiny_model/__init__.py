"""The embedded model: the text it was trained on, its training, its figures, and the weights themselves."""
