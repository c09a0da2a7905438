"""From the columns of a step message to the deltas of each request."""
