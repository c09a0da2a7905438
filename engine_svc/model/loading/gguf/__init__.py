"""GGUF files: header, names, config, tokenizer, and the folder by which the rest of the engine knows one.
Must not know requests or steps; only `weights` and `blocks` import torch.
"""
