"""Messages of clients, controller and engine: frozen Structs, a union per direction, their bytes.

Every Struct is encoded as an array, and old logs stay readable: positions never move, and a new
field comes last and has a default. Only the standard library and msgspec are imported; nothing
here opens a socket or a file, or reads a clock.
"""

from typing import Final

VERSION: Final = "0.1.0"
"""The version of LoRADock, which the command and the gateway report."""
