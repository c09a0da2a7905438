"""From the name of a model to its weights: hub, checkpoint files, safetensors, loader.
Must not know requests or steps.
"""
