"""Vectors as clients receive them."""

import struct


def unpack_vector(vector: bytes) -> list[float]:
    """Decode little-endian float32 numbers."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
