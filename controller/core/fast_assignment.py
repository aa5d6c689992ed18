"""Structs whose fields are assigned as fast as fields of other classes."""

from typing import TypeVar

from msgspec import Struct

S = TypeVar("S", bound=Struct)


def fast_assignment(kind: type[S]) -> type[S]:
    """Let the interpreter assign the fields of a struct with `gc=False`; a class decorator.

    msgspec's own assignment is there for the garbage collector, which does not visit these structs,
    and hides from the interpreter where a field is: it takes several times as long.
    """
    # Both: they are one function of the type. In the class's body msgspec would replace them.
    kind.__setattr__ = object.__setattr__  # type: ignore[method-assign]
    kind.__delattr__ = object.__delattr__  # type: ignore[method-assign]
    return kind
