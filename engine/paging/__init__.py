"""Keys and values in blocks of tokens, and forward passes of unequal rows without padding."""
