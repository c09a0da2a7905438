"""The frontend service: takes text from clients, sends token ids to engines, streams text. Knows no tensors."""
