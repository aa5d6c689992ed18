"""The version of LoRADock, which the command and the gateway report."""

from typing import Final

VERSION: Final = "0.1.0"
