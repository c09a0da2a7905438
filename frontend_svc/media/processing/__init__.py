"""Makes of media what the encoders of models take, in text workers alone, as it needs Pillow and numpy.

Knows no engine, no request and no address.
"""
