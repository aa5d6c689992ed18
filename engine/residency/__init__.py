"""Where adapters are on host and device: staging, arena, copies and the commands that move them."""
