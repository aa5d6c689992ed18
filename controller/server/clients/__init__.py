"""Parts of the client sessions: a client's identity, its payloads and the replies to it."""
