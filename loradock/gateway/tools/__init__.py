"""Calls of tools in a model's text: formats, parsers, and the blocks that answers consist of."""
