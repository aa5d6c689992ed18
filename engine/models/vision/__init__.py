"""Images of prompts: decoding, the model's encoder, its inputs, and the mapping of its adapters."""
