"""OpenAI's Realtime API over a WebSocket, text alone: each response is a chat. Knows no engine."""
