"""The architectures whose decode steps stay dynamic, and why; all others can be captured."""

from typing import Final

NOT_STATIC: Final = {
    "gpt_neo": "static step over 64 columns differs",
    "mpt": "HostSync",
    "xglm": "HostSync",
}
"""`model_type` -> a part of the reason. The first counts its window from the last column; the
others compare the columns so far with the length of a table.
"""
