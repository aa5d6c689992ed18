"""The engine: one process that holds the base model and the adapters' weights.

What it is: reading and checking adapter files, laying them out, writing device slots, and running
batches over them. What it is not: a decider; who is loaded, staged or evicted is the controller's
word. One rule: a failed operation changes nothing that a batch can see.
"""
