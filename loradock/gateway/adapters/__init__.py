"""Adapters and model names as HTTP clients see them, and the endpoints that change adapters."""
