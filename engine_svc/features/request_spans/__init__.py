"""A trace span for each request."""
