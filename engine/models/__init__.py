"""A transformers model made servable: load, shard, probe, pack, wrap, bind, run."""
