"""Requests to tokens and vectors: queue, batch, decode, sample, detokenize."""
