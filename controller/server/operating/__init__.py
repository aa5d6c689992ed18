"""What the operator of a server sees and changes: requests, slow operations, settings, its end."""
