"""Figures, each measured beside a yardstick in the same run.

What it is: one module a group, and `run`, which prints the table and writes `results.json`. What it
is not: tests; a figure never fails a build. One rule: what is compared is measured in turns, so
that a noisy machine is noisy to both.
"""
