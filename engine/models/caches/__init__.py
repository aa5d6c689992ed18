"""What the running rows of a generating model have in memory, by what its layers need."""
