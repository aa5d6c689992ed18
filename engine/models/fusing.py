"""One kernel in place of a chain of PyTorch's, where a model's own norms and rotations equal it.

On a CUDA device, each norm of a decoder layer is eight launches, and the rotation of queries and
keys ten. What a module computes is compared at start, whatever its name is.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

from loradock.engine.kernels.interface import FusedOperations
from loradock.engine.models.observation import relative_difference

_OFFSETS: Final = (0.0, 1.0)
_EPSILONS: Final = ("variance_epsilon", "eps")
_ROTATION: Final = "apply_rotary_pos_emb"
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_ROWS: Final = 3
_WIDTH: Final = 16

ROUNDINGS_MAX: Final = 4
"""The relative norm, in units of the dtype's rounding, by which results can differ."""

Rotation = Callable[..., tuple[Tensor, Tensor]]


def fuse(model: nn.Module, operations: FusedOperations) -> tuple[str, ...]:
    """Let norms and rotations run as one kernel each; return their names in the model's code.

    What needs a gradient, and what is on another kind of device than the model, continues to run as
    the model's own code: a rotation is a function that all models of a module share.
    """
    fused: set[str] = set()
    classes: dict[tuple[type[nn.Module], float], type[nn.Module]] = {}
    for module in [one for one in model.modules() if _can_be_norm(one)]:
        kind: Any = type(module)
        # One that was fused for other operations before.
        kind = module.__class__ = getattr(kind, "loradock_own", kind)
        offset = _offset_of(module, operations)
        if offset is not None:
            if (kind, offset) not in classes:
                classes[kind, offset] = _fused_norm(kind, offset, operations)
            module.__class__ = classes[kind, offset]
            fused.add(kind.__name__)
    like = next((one for one in model.parameters() if one.dtype in _DTYPES), None)
    for name in {type(module).__module__ for module in model.modules()}:
        if like is not None and _fuse_rotation(sys.modules[name], like, operations):
            fused.add(_ROTATION)
    return tuple(sorted(fused))


def _can_be_norm(module: nn.Module) -> bool:
    parameters = [*module.parameters()]
    return (
        len(parameters) == 1
        and parameters[0] is getattr(module, "weight", None)
        and parameters[0].ndim == 1
        and parameters[0].dtype in _DTYPES
        and _epsilon_of(module) is not None
    )


def _offset_of(module: nn.Module, operations: FusedOperations) -> float | None:
    """Return what a norm adds to its weights; None for a module that is no such norm."""
    weight: Any = module.weight
    generator = torch.Generator().manual_seed(0)
    # A norm that subtracts the mean differs, as the mean is not 0.
    x = (1 + torch.randn(_ROWS, len(weight), generator=generator)).to(weight)
    factors = torch.rand(len(weight), generator=generator).to(weight)
    try:
        with torch.no_grad():
            own = torch.func.functional_call(module, {"weight": factors}, (x,))
            eps = _epsilon_of(module) or 0.0
            found = {offset: operations.rms_norm(x, factors, eps, offset) for offset in _OFFSETS}
    except (TypeError, ValueError, RuntimeError):
        return None
    return next((offset for offset in _OFFSETS if _is_equal(found[offset], own)), None)


def _epsilon_of(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _is_equal(found: Tensor, own: Any) -> bool:
    is_alike = isinstance(own, Tensor) and own.shape == found.shape and own.dtype == found.dtype
    error_max = ROUNDINGS_MAX * torch.finfo(found.dtype).eps
    return is_alike and relative_difference(found, own) <= error_max


def _fused_norm(kind: Any, offset: float, operations: FusedOperations) -> type[nn.Module]:
    """Return the class of norms that run as one kernel, and keep all else."""

    class FusedNorm(kind):  # type: ignore[misc]
        loradock_own: Any

        def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
            weight = self.weight
            is_other = x.device != weight.device or x.dtype != weight.dtype
            if rest or named or is_other or _needs_gradient(x, weight):
                return super().forward(x, *rest, **named)
            return operations.rms_norm(x, weight, _epsilon_of(self) or 0.0, offset)

    FusedNorm.__name__, FusedNorm.__qualname__ = kind.__name__, kind.__qualname__
    FusedNorm.__module__, FusedNorm.loradock_own = kind.__module__, kind
    return FusedNorm


def _fuse_rotation(module: Any, like: Tensor, operations: FusedOperations) -> bool:
    """Replace the rotation of a module of models if it is `rotate`; return whether it is."""
    own: Rotation | None = getattr(module, _ROTATION, None)
    if own is None or [*inspect.signature(own).parameters][:4] != ["q", "k", "cos", "sin"]:
        return False
    own, device_type = getattr(own, "loradock_own", own), like.device.type
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, _ROWS, _WIDTH), (1, 1, _ROWS, _WIDTH), (1, _ROWS, _WIDTH), (1, _ROWS, _WIDTH)
    operands = [torch.randn(shape, generator=generator).to(like) for shape in shapes]
    try:
        with torch.no_grad():
            expected, found = own(*operands), operations.rotate(*operands)
    except (TypeError, ValueError, RuntimeError):
        return False
    if not all(map(_is_equal, found, expected)):
        return False

    @wraps(own)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        is_other = q.device.type != device_type
        if rest or named or is_other or _needs_gradient(q, k) or not _fits(q, k, cos, sin):
            return own(q, k, cos, sin, *rest, **named)
        return operations.rotate(q, k, cos, sin)

    rotated.loradock_own = own  # type: ignore[attr-defined]
    setattr(module, _ROTATION, rotated)
    return True


def _needs_gradient(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in operands)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the operands are as `FusedOperations` has them."""
    if not q.dtype == k.dtype == cos.dtype == sin.dtype:
        return False
    if not (q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape == sin.shape):
        return False
    is_dense = q.stride(3) == k.stride(3) == cos.stride(2) == 1 and cos.stride() == sin.stride()
    is_whole = q.shape[3] == k.shape[3] == cos.shape[2] and q.shape[3] % 2 == 0
    is_one = q.shape[2] == k.shape[2] == cos.shape[1] and q.shape[0] == k.shape[0] == cos.shape[0]
    return is_dense and is_whole and is_one
