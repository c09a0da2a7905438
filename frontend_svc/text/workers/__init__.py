"""Child processes that tokenize, render chat templates and check constraints, and can be killed.
Must not know requests.
"""
