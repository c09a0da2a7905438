"""The frontend service: text from clients to token ids for engines, and outputs back. Knows no tensors."""
