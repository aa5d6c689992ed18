"""The model that a program passes to a manager: checks before anything of it changes, and hooks.

The layers that the program's model calls are replaced, so it must be the model itself, and not
something that was made of it. A program may compile the wrapped model. A layer reads the batch's
mapping and views of the arena, which change between two calls: a graph of them would be compiled
anew for each combination of adapters, and inductor does not compile them.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from loradock.engine.errors import ModelRefused
from loradock.engine.layers import CONVOLUTION_WRAPPERS, WRAPPERS, BaseLayerWithLoRA, wrapper_of
from loradock.engine.layers.packed import PackedSlice


def check_kind(name: str, value: object, kind: type, instead: str = "") -> None:
    """Raise `TypeError` for an argument of another kind; `instead`: what to write for it."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}{instead}")


def check_model(model: nn.Module) -> None:
    """Raise `ModelRefused` for a model whose layers can't be replaced; its text names what can."""
    check_kind("the model", model, nn.Module)
    if any(isinstance(module, BaseLayerWithLoRA) for module in model.modules()):
        raise ModelRefused(
            "the model's layers are wrapped by another manager; use that one, model.lora_manager, "
            "or load the model again"
        )
    problem = next(_problems(model), None)
    if problem is not None:
        raise ModelRefused(problem)


def _problems(model: nn.Module) -> Iterator[str]:
    if isinstance(model, torch.jit.ScriptModule):
        yield "the model is TorchScript; pass the model that it was made of"
    for path, module in model.named_modules():
        reason = _reason(module)
        if reason:
            yield f"{path or 'the model'} {reason}"
    if wrapper_of(model, table=(*WRAPPERS, *CONVOLUTION_WRAPPERS)) is not None:
        yield "the model is a single layer; pass a module that calls it, such as nn.Sequential"
    for name, tensor in model.named_parameters():
        if is_lazy(tensor):
            yield f"{name} has no shape yet; run the model once before a manager is made"
        elif tensor.is_meta:
            yield f"{name} is on the meta device and has no values; load the model's weights first"


def _reason(module: nn.Module) -> str:
    """Return what a module was made of, and what to pass instead; empty for a usual one."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return f"is {type(module).__name__}, which copies layers; pass its .module"
    if hasattr(module, "_fsdp_wrapped_module"):
        return "is split by FSDP; pass a whole model, or serve it on several ranks"
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return (
            "is compiled, and its code would call the layers as they were; make the manager first, "
            "then compile manager.model"
        )
    if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
        return "has adapters of PEFT; pass the base model, which PeftModel.unload() returns"
    return ""


def keep_uncompiled(model: nn.Module) -> None:
    """Let the graphs of a compiled model end before each wrapped layer, and continue after it."""
    for layer in model.modules():
        if isinstance(layer, BaseLayerWithLoRA | PackedSlice):
            _end_graphs(layer)


def _end_graphs(layer: nn.Module) -> None:
    forward: Callable[..., Any] = layer.forward

    @wraps(forward)
    def call(*inputs: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return _uncompiled(forward, *inputs, **options)
        return forward(*inputs, **options)

    layer.forward = call


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="layers with adapters read the batch's mapping; compile without fullgraph"
)
def _uncompiled(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return forward(*inputs, **options)


def warn_when_saved(model: nn.Module) -> None:
    """Let `save_pretrained` of a wrapped model warn about the names that it saves."""
    save = getattr(model, "save_pretrained", None)
    if save is None:
        return

    def save_and_warn(*arguments: Any, **options: Any) -> Any:
        warnings.warn(
            "this model's layers are wrapped for LoRA, so its weights are saved under other names "
            "(base_layer) and from_pretrained() does not find them; save the model before a "
            "manager is made",
            stacklevel=2,
        )
        return save(*arguments, **options)

    model.save_pretrained = save_and_warn  # type: ignore[assignment]
