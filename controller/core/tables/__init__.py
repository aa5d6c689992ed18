"""The core's tables: a dict with an incremental digest, and the queues of the memory tiers."""
