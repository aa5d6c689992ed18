"""The architectures whose decode steps are not captured, and why; all others are."""

from typing import Final

NOT_CAPTURED: Final = {
    "bloom": "accepts no positions",
    "deepseek_v2": "KeyError",
    "deepseek_v3": "KeyError",
    "diffllama": "differs from the model's own",
    "doge": "AttributeError",
    "falcon": "TypeError",
    "gpt_neo": "TypeError",
    "minicpm3": "KeyError",
    "mpt": "accepts no positions",
    "xglm": "AttributeError",
}
"""`model_type` -> a part of the reason. None of them has packed passes.

A KeyError is of a model that expands the keys that its cache returned, the other errors are of
masks that it changes.
"""
