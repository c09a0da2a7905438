"""Paged KV book-keeping: which blocks belong to which request.
Must not know tensors, clocks or budgets.
"""
