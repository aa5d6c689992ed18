"""Everything of the controller that touches the world outside.

What it is: the loop, the sockets, the log, snapshots and replay. What it is not: a place where
anything is decided; that is the core's. One rule: log, then handle, then act.
"""
