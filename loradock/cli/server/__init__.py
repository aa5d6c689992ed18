"""Commands on a running server: readiness, stop, requests in progress, settings."""
