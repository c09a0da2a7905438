"""What both sides of the scenario ask for. Imports nothing: it also runs where only `openai` is installed."""

PROMPT = "Once upon a time"
MESSAGE = "Tell me a story about a tower"
SAMPLED = {"seed": 7, "temperature": 0.8, "max_tokens": 40}
FOLLOWING = "And what is in it?"
EMBEDDED = ["the cat sat on the mat", "a dog"]
