"""Adoption: engines keep the requests of a frontend that has gone, and this frontend takes them over.
Must not know text.
"""
