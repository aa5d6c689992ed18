"""Mapping of a batch's rows to adapter slots and groups, and the calls of the kernels."""

from loradock.engine.punica.mapping import LoRAMapping, LoRAMappingType, MappingType
from loradock.engine.punica.wrapper import PunicaWrapper

__all__ = ["LoRAMapping", "LoRAMappingType", "MappingType", "PunicaWrapper"]
