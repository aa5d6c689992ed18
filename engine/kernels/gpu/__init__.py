"""The Triton implementation of every operation; imported only when it is chosen.

A launch's grid depends on the batch's bounds alone. Everything else about the batch is read on the
device, so that a captured graph can be replayed for other batches.
"""
