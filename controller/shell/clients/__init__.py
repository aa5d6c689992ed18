"""Parts of the client sessions: who a client is, its payloads, and the replies to it."""
