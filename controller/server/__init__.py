"""The controller's process: main loop, sockets, client sessions, engine link, event stream.

The supervisor of `loradock serve` is here too. Decisions are the core's.
"""
