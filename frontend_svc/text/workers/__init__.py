"""Child processes that tokenize and render templates, and can be killed.
Must not know requests.
"""
