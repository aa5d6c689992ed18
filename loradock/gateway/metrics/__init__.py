"""Metrics: what this gateway measured, what the controller counted, under two sets of names."""
