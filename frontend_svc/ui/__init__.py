"""The page of the frontend about itself and its engines. Must not know the streams of engines."""
