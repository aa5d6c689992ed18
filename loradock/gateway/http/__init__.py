"""What every endpoint needs: bodies, errors, keys, streams of server-sent events."""
