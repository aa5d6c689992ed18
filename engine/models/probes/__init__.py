"""Probes of a model at start: tiny forwards that show how it can be served, and why not."""
