"""The embedded model: the weights that ship with the package. `tools/tiny_model` trains them."""
