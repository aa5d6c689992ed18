"""Where adapters are on host and device: staging, the arena, copies, and the commands that move them."""
