"""The command `loradock`.

What it is: one file a group of commands, over the client library and the shell's functions. What
it is not: a second way of doing anything. One rule: what a person sees is on stdout, what a
program reads is on stdout with `--json`, and everything about the doing is on stderr.
"""
