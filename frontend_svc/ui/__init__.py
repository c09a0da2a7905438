"""What the frontend shows of itself and its engines in a browser. Must not know the streams of engines."""
