"""OpenAI's HTTP API: bodies, their translation into requests and back, routes, and the listener."""
