"""What images add to a model: decoding, the encoder, and its mappings."""
