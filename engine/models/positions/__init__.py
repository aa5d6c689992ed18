"""Positions of tokens: how long a model's context is, and how a row's length scales rotations."""
