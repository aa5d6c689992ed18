"""Caches of the running rows of a generating model, by what its layers need."""
