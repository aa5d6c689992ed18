"""Decode steps of padded batches: dynamic, or static ones that are captured and replayed."""
