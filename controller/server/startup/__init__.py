"""Checks before a server starts, in words, without loading the model."""
