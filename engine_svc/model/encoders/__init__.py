"""Encoders of images and sound beside a decoder, a file for each family. Knows no requests and no steps."""
