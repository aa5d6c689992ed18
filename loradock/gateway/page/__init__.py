"""The page at `/` and the stream of events from which it follows the adapters."""
