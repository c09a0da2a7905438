"""The transformers backend: any decoder that uses transformers' attention interface, over the paged cache.
Must not know requests.
"""
