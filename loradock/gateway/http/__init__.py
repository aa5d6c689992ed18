"""The base of all endpoints: bodies, errors, keys, streams of server-sent events."""
