"""The core's tables: a dict with an incremental digest, windows of answers, queues of the tiers."""
