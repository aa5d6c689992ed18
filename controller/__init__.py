"""The event-driven controller: one life cycle per adapter, decided by one pure function.

Every decision is made by the core (no socket, file, clock or randomness) from logged inputs alone.
The log, the shell, the client library and the command line are around it. torch and the engine are
never imported.
"""
