"""The cases for a frontend, a file for each section of the specification, and one for turns.
Must not wait without a limit, nor rely on which of the two engines a request is sent to.
"""
