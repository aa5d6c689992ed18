"""The only room that imports transformers: each name once, with what stands in if it is absent.

The rest of the engine imports from these modules, so a renamed class or argument is a change of one
place. What a name means is checked by probes when a model is prepared, not by a version.
"""
