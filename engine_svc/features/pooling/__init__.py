"""Results from hidden states in place of tokens: embeddings, classes and scores of prompts or tokens.

1. `wire` reads the pooling parameters of an ADD and checks them against the model's tasks.
2. The request samples no token; the scheduler ends it when its prompt is computed, and `scheduler` counts it.
3. `runner` gathers states of its row step by step, and makes the result with the model's pooler in the last.
4. Vectors of tokens may be kept under a key; a score by a key is blocked until `runner` has found them.
5. The result goes to the client as a tensor, in several messages if it is large.
"""
