"""The pure core: one function from an input to actions, and the only writer of the world."""
