"""The append-only log of inputs and its replay: format, segments, writer and repair."""
