"""The command `loradock`: one module per group of commands.

What a person reads is on stdout, and so is what a program reads with `--json`. Progress, notes and
errors are on stderr.
"""
