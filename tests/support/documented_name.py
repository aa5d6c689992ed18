"""One documented name, as the table of documented names has them."""

from typing import NamedTuple


class DocumentedName(NamedTuple):
    """A documented name.

    `place`: module and attribute here, with a colon between them. `arguments`: the documented ones,
    in order, between spaces; those after `*` are keywords. `difference`: what differs, with the
    reason; empty for nothing.
    """

    name: str
    place: str
    arguments: str = ""
    difference: str = ""
