"""Which engines there are, which one is picked, and the stream to each."""
