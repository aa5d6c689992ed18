"""Benchmarks: figures that are measured against a yardstick in the same run.

There is one module per group; `benchmarks.run` prints the table and writes `results.json`.
Measurements that are compared are interleaved, so that noise of the machine affects both. A figure
never fails a build.
"""
