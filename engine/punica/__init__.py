"""One batch's mapping to slots and groups, and the way to the kernels."""

from engine.punica.mapping import LoRAMapping, MappingType
from engine.punica.wrapper import PunicaWrapper

__all__ = ["LoRAMapping", "MappingType", "PunicaWrapper"]
