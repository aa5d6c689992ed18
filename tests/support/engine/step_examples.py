"""What the tests of decode steps share: which architectures stay with a growing cache, and why.

One rule: an architecture that is not named here is captured.
"""

from typing import Final

GROWING: Final = {
    "gpt_neo": "64 fixed columns answers otherwise",
    "mpt": "HostRead",
    "xglm": "HostRead",
}
"""`model_type` -> words of the reason. The first counts its window from the last column; the others
compare the columns so far with the length of a table.
"""
