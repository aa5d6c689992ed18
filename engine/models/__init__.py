"""Preparation and forward passes of `transformers` models: load, shard, probe, pack, wrap, bind,
run.
"""
