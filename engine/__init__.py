"""The engine: one process that holds the base model and the adapters' weights.

It reads and checks adapter files, stages them on the host, writes device slots and runs batches.
The controller decides which adapters are staged, loaded and evicted. A failed operation must change
nothing that a batch can see.
"""
