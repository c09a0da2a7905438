"""The device's memory: size, tensors and release of the KV cache.
Must not know requests.
"""
