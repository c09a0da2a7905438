"""Child processes that tokenize and render chat templates, and can be killed.
Must not know requests.
"""
