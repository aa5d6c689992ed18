"""The serving room: who runs next, in which blocks, and who waits."""
