"""Logits to tokens: penalties, structures, the choice itself, and log-probabilities."""
