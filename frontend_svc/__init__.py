"""The text service: requests in words come in, token ids go to engines, words go back. Knows no tensors."""
