"""The event-driven controller: one life cycle per adapter, decided by one pure function.

What it is: the core at its top (no socket, file, clock or randomness), the shell around it, the
client library and the command line. What it is not: the model; torch and the engine are never
imported. One rule: whatever is decided follows from logged inputs alone.
"""
