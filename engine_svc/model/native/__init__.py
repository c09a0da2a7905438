"""Fast decoders of the block that Llama, Qwen, Mistral and their mixtures of experts share."""
