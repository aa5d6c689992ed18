"""Products of bfloat16 matrices in Triton's interpreter, which by itself multiplies their bits."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def correct_products() -> None:
    """Let the interpreter convert bfloat16 operands of a product to float32, which is exact."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(builder, _widened(a), _widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _widened(operand: Any) -> Any:
    """Return the operand; bfloat16, which NumPy lacks, is stored as the upper half of float32."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    values = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)
