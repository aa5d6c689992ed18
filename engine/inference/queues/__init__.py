"""Queues of waiting sequences: in turns of their adapters, and by priority."""
