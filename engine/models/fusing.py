"""One kernel in place of a chain of PyTorch's, where a model's own modules equal it.

On a CUDA device, each norm of a decoder layer is eight launches, the rotation of queries and keys
ten, and a gate two. What a module computes is compared at start, whatever its name is.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.kernels.interface import ACTIVATIONS, FusedOperations
from loradock.engine.models.observation import relative_difference

_OFFSETS: Final = (0.0, 1.0)
_EPSILONS: Final = ("variance_epsilon", "eps")
_ROTATION: Final = "apply_rotary_pos_emb"
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_ROWS: Final = 3
_WIDTH: Final = 16
_GATED: Final = ("gate_proj", "up_proj", "down_proj")
_LAYER: Final = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")

ROUNDINGS_MAX: Final = 4
"""The relative norm, in units of the dtype's rounding, by which results can differ."""

Rotation = Callable[..., tuple[Tensor, Tensor]]


class _Fusion(NamedTuple):
    """A kind of module: what the operation needs to equal one, None for others, and its class."""

    find: Callable[[nn.Module, FusedOperations], Any]
    make: Callable[[Any, Any, FusedOperations], type[nn.Module]]


def fuse(model: nn.Module, operations: FusedOperations) -> tuple[str, ...]:
    """Let a model's modules run as one kernel where one equals them; return their names.

    What needs a gradient, and what is on another kind of device than the model, continues to run as
    the model's own code: a rotation is a function that all models of a module share.
    """
    fused: set[str] = set()
    modules = [*model.modules()]
    for module in modules:
        # One that was fused for other operations before.
        module.__class__ = getattr(type(module), "loradock_own", type(module))
    for fusion in _FUSIONS:
        classes: dict[tuple[type[nn.Module], Any], type[nn.Module]] = {}
        for module in modules:
            kind, needed = type(module), fusion.find(module, operations)
            if needed is None:
                continue
            if (kind, needed) not in classes:
                classes[kind, needed] = _named_like(kind, fusion.make(kind, needed, operations))
            module.__class__ = classes[kind, needed]
            fused.add(kind.__name__)
    like = next((one for one in model.parameters() if one.dtype in _DTYPES), None)
    for name in {type(module).__module__ for module in modules}:
        if like is not None and _fuse_rotation(sys.modules[name], like, operations):
            fused.add(_ROTATION)
    return tuple(sorted(fused))


def _named_like(kind: type[nn.Module], made: Any) -> Any:
    made.__name__, made.__qualname__ = kind.__name__, kind.__qualname__
    made.__module__, made.loradock_own = kind.__module__, kind
    return made


def _can_be_norm(module: nn.Module) -> bool:
    parameters = [*module.parameters()]
    return (
        len(parameters) == 1
        and parameters[0] is getattr(module, "weight", None)
        and parameters[0].ndim == 1
        and parameters[0].dtype in _DTYPES
        and _epsilon_of(module) is not None
    )


def _norm_offset(module: nn.Module, operations: FusedOperations) -> float | None:
    """Return what a norm adds to its weights; None for a module that is no such norm."""
    if not _can_be_norm(module):
        return None
    weight: Any = module.weight
    # A norm that subtracts the mean differs, as the mean is not 0.
    x = (1 + _random(_ROWS, len(weight))).to(weight)
    factors = torch.rand(len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        with torch.no_grad():
            own = torch.func.functional_call(module, {"weight": factors}, (x,))
            eps = _epsilon_of(module)
            found = {offset: operations.rms_norm(x, factors, eps, offset) for offset in _OFFSETS}
    except MODEL_CODE_ERRORS:
        return None
    return next((offset for offset in _OFFSETS if _is_equal(found[offset], own)), None)


def _epsilon_of(module: Any) -> Any:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _is_equal(found: Tensor, own: Any) -> bool:
    is_alike = isinstance(own, Tensor) and own.shape == found.shape and own.dtype == found.dtype
    error_max = ROUNDINGS_MAX * torch.finfo(found.dtype).eps
    return is_alike and relative_difference(found, own) <= error_max


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _fused_norm(kind: Any, offset: float, operations: FusedOperations) -> type[nn.Module]:
    """Return the class of norms that run as one kernel, and keep all else."""

    class FusedNorm(kind):  # type: ignore[misc]
        loradock_offset = offset
        # An input whose norm is known already, and that norm: it was computed with a sum.
        loradock_known: tuple[Tensor, Tensor] | None = None

        def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
            weight, known = self.weight, self.loradock_known
            if known is not None and known[0] is x:
                return known[1]
            is_other = x.device != weight.device or x.dtype != weight.dtype
            if rest or named or is_other or not _is_served(self, x):
                return super().forward(x, *rest, **named)
            return operations.rms_norm(x, weight, _epsilon_of(self), offset)

    return FusedNorm


class _Stub(nn.Module):
    """Computes a function in place of a child, and keeps the arguments that it was called with."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._function = function
        self.named: Mapping[str, Any] = {}

    def forward(self, *inputs: Tensor, hidden_states: Tensor | None = None, **named: Any) -> Any:
        """Compute the function of the only tensor; the other arguments are kept."""
        self.named = named
        (x,) = inputs if hidden_states is None else (hidden_states, *inputs)
        return self._function(x)


def _with_children(module: nn.Module, **children: nn.Module) -> Any:
    """Return a module like this one with other children."""
    probe = copy.copy(module)
    probe._modules = {**module._modules, **children}
    return probe


def _activation(module: nn.Module, operations: FusedOperations) -> tuple[str, str] | None:
    """Return a gated unit's activation and its type of device; None for a module that is none."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in _GATED):
        return None
    like: Any = next(iter(module.parameters()), None)
    if like is None or like.dtype not in _DTYPES:
        return None
    gate, up, down = _Stub(lambda x: 2 * x), _Stub(lambda x: x - 1), _Stub(torch.tanh)
    probe = _with_children(module, **dict(zip(_GATED, (gate, up, down), strict=True)))
    x = _random(_ROWS, _WIDTH).to(like)
    try:
        with torch.no_grad():
            own = probe(x)
            found = {one: down(operations.gate(gate(x), up(x), one)) for one in ACTIVATIONS}
    except MODEL_CODE_ERRORS:
        return None
    equal = next((one for one in ACTIVATIONS if _is_equal(found[one], own)), None)
    return None if equal is None else (equal, like.device.type)


def _fused_gate(kind: Any, needed: tuple[str, str], operations: FusedOperations) -> type[nn.Module]:
    """Return the class of gated units whose gate is one kernel."""
    activation, device_type = needed

    class FusedGate(kind):  # type: ignore[misc]
        def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
            if rest or named or x.device.type != device_type or not _is_served(self, x):
                return super().forward(x, *rest, **named)
            return self.down_proj(operations.gate(self.gate_proj(x), self.up_proj(x), activation))

    return FusedGate


class _LayerArguments(NamedTuple):
    """The names of a layer's arguments after the first, and those that have a default."""

    names: frozenset[str]
    defaults: tuple[tuple[str, Any], ...]


def _layer_arguments(module: nn.Module, operations: FusedOperations) -> _LayerArguments | None:
    """Return the arguments of a decoder layer that passes all of them to its attention.

    None for a module that is no such layer: a norm, attention, a sum, a norm of it, and a sum with
    what follows.
    """
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in _LAYER):
        return None
    norm: Any = module.post_attention_layernorm
    if not hasattr(norm, "loradock_offset"):
        return None
    _, *others = inspect.signature(module.forward).parameters.values()
    others = [one for one in others if one.kind is not inspect.Parameter.VAR_KEYWORD]
    found = _LayerArguments(
        frozenset(one.name for one in others),
        tuple((o.name, o.default) for o in others if o.default is not inspect.Parameter.empty),
    )
    attention, mlp = _Stub(lambda x: (torch.tanh(x), None)), _Stub(torch.sin)
    probe = _with_children(module, self_attn=attention, mlp=mlp)
    # Objects that nothing can be computed from: what an attention receives is what was given.
    given = {name: object() for name in found.names}
    x = _random(1, _ROWS, len(norm.weight)).to(norm.weight)
    try:
        with torch.no_grad():
            own, passed = probe(x, **given), attention.named
            fused = _run_layer(probe, x, given, operations)
    except MODEL_CODE_ERRORS:
        return None
    return found if passed == attention.named and _is_equal(fused, own) else None


def _run_layer(
    layer: Any, x: Tensor, named: Mapping[str, Any], operations: FusedOperations
) -> Tensor:
    norm = layer.post_attention_layernorm
    attended = layer.self_attn(hidden_states=layer.input_layernorm(x), **named)[0]
    total, normed = operations.add_norm(
        x, attended, norm.weight, _epsilon_of(norm), norm.loradock_offset
    )
    # The norm is called for its hooks: an adapter can have saved it.
    norm.loradock_known = (total, normed)
    normed = norm(total)
    norm.loradock_known = None
    whole: Tensor = total + layer.mlp(normed)
    return whole


def _fused_layer(
    kind: Any, arguments: _LayerArguments, operations: FusedOperations
) -> type[nn.Module]:
    """Return the class of layers whose inner sum and its norm are one kernel."""
    names, defaults = arguments.names, dict(arguments.defaults)

    class FusedLayer(kind):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
            norm = self.post_attention_layernorm
            is_known = not rest and names.issuperset(named) and hasattr(norm, "loradock_offset")
            is_other = hidden_states.device != norm.weight.device
            if not is_known or is_other or not _is_served(self, hidden_states):
                return super().forward(hidden_states, *rest, **named)
            return _run_layer(self, hidden_states, {**defaults, **named}, operations)

    return FusedLayer


_FUSIONS: Final = (
    _Fusion(_norm_offset, _fused_norm),
    _Fusion(_activation, _fused_gate),
    # After the norms, which layers are made of.
    _Fusion(_layer_arguments, _fused_layer),
)


def _is_served(module: nn.Module, x: Tensor) -> bool:
    """Return whether operations can compute a module: in its dtype, and without a gradient."""
    return x.dtype in _DTYPES and not (
        torch.is_grad_enabled() and _needs_gradient(x, *module.parameters())
    )


def _fuse_rotation(module: Any, like: Tensor, operations: FusedOperations) -> bool:
    """Replace the rotation of a module of models if it is `rotate`; return whether it is."""
    own: Rotation | None = getattr(module, _ROTATION, None)
    if own is None or [*inspect.signature(own).parameters][:4] != ["q", "k", "cos", "sin"]:
        return False
    own, device_type = getattr(own, "loradock_own", own), like.device.type
    shapes = (1, 2, _ROWS, _WIDTH), (1, 1, _ROWS, _WIDTH), (1, _ROWS, _WIDTH), (1, _ROWS, _WIDTH)
    operands = [_random(*shape, seed=seed).to(like) for seed, shape in enumerate(shapes)]
    try:
        with torch.no_grad():
            expected, found = own(*operands), operations.rotate(*operands)
    except MODEL_CODE_ERRORS:
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
