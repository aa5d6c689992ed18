"""The LoRA operations on a GPU, in Triton: one operation a file, as beside the references.

What it is: kernels, their launchers and the table of tile sizes. What it is not: a place that is
imported where Triton may be missing; `engine.kernels` imports it when it is chosen. One rule: a
launch depends on the batch's bounds alone, and everything about the batch is read on the device.
"""
