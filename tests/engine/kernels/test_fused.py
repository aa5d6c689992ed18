"""Fused kernels against the formulas of models, and which modules they stand in for."""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from loradock.engine.kernels.interface import ACTIVATIONS, FusedOperations
from loradock.engine.models.fusing import _fuse_rotation, fuse
from loradock.engine.models.observation import relative_difference

triton = pytest.importorskip("triton")
fused = pytest.importorskip("loradock.engine.kernels.gpu.fused")

pytestmark = pytest.mark.skipif(
    not (triton.knobs.runtime.interpret or torch.cuda.is_available()),
    reason="needs TRITON_INTERPRET or a GPU",
)
OPERATIONS = FusedOperations(fused.rms_norm, fused.add_norm, fused.rotate, fused.gate)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROTATION = "apply_rotary_pos_emb"
NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Activations by the names that models give them."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 1).to(DEVICE, dtype)


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    assert relative_difference(found, exact) < torch.finfo(found.dtype).eps


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 3, 100), (5, 4, 2, 33)])
def test_a_norm_is_that_of_the_formula(
    shape: tuple[int, ...], offset: float, dtype: torch.dtype
) -> None:
    # Every second row: rows need not be adjacent.
    x, weight = random(*shape, dtype=dtype)[:, ::2], random(shape[-1], dtype=dtype)
    exact = x.double()
    exact = (
        exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * (offset + weight.double())
    )
    found = fused.rms_norm(x, weight, 1e-5, offset)
    assert found.shape == x.shape
    assert_rounded(found, exact)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 3, 100)])
def test_a_sum_is_rounded_before_its_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    both = random(2, *shape, dtype=dtype)
    x, added, weight = both[0], both[1].flip(-1), random(shape[-1], dtype=dtype)
    total, normed = fused.add_norm(x, added, weight, 1e-5, 1.0)
    assert_rounded(total, x.double() + added.double())
    torch.testing.assert_close(normed, fused.rms_norm(total, weight, 1e-5, 1.0))


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [5, 96, 2500])
def test_a_gate_is_that_of_the_formula(width: int, activation: str, dtype: torch.dtype) -> None:
    # As a packed projection leaves them, both in one tensor.
    gates, ups = (3 * random(2, 3, 2 * width, dtype=dtype) - 3).split(width, -1)
    exact = ACT2FN[NAMES[activation]](gates.double()) * ups.double()
    assert_rounded(fused.gate(gates, ups, activation), exact)


@DTYPES
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 16), ((6, 2), 96), ((1, 1), 2)])
def test_a_rotation_is_that_of_the_model(
    heads: tuple[int, int], width: int, dtype: torch.dtype
) -> None:
    rows, tokens = 2, 3
    # As a projection leaves them: heads next to each other, queries and keys in one tensor.
    both = random(rows, tokens, sum(heads) * width, dtype=dtype).view(rows, tokens, -1, width)
    query, keys = (part.transpose(1, 2) for part in both.split(heads, 2))
    cos, sin = random(rows, tokens, width, dtype=dtype), random(rows, tokens, width, dtype=dtype)
    exact = apply_rotary_pos_emb(*(one.double() for one in (query, keys, cos, sin)))
    for found, expected in zip(fused.rotate(query, keys, cos, sin), exact, strict=True):
        assert found.shape == expected.shape
        assert_rounded(found, expected)


class Counted:
    """The operations, and how often each was called since they were counted last."""

    def __init__(self) -> None:
        self._calls = Counter[str]()
        named = OPERATIONS._asdict().items()
        self.operations = FusedOperations(*(partial(self._call, *one) for one in named))

    def _call(self, name: str, operation: Callable[..., Any], *operands: Any) -> Any:
        self._calls[name] += 1
        return operation(*operands)

    def take(self) -> dict[str, int]:
        found, self._calls = dict(self._calls), Counter()
        return found


@pytest.fixture(autouse=True)
def own_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo after each test what is replaced in a module."""
    for module in (modeling_llama, modeling_cohere):
        monkeypatch.setattr(module, ROTATION, inspect.unwrap(getattr(module, ROTATION)))


def small_llama(**fields: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes, **fields)
    return LlamaForCausalLM(config).to(DEVICE).eval().requires_grad_(False)


def test_a_model_runs_fused_and_computes_the_same() -> None:
    model, counted = small_llama(), Counted()
    tokens = torch.arange(5, device=DEVICE)[None]
    with torch.no_grad():
        own = model(tokens).logits
        names = ("LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm", ROTATION)
        assert fuse(model, counted.operations) == names
        counted.take()
        torch.testing.assert_close(model(tokens).logits, own)
    assert counted.take() == {"rms_norm": 3, "add_norm": 2, "rotate": 2, "gate": 2}


def test_what_needs_a_gradient_is_the_models_own() -> None:
    """A rotation is replaced for all models of a module, one that is trained included."""
    model, counted = small_llama(), Counted()
    fuse(model, counted.operations)
    counted.take()
    model.requires_grad_(True)
    model(torch.arange(5, device=DEVICE)[None]).logits.sum().backward()
    assert counted.take() == {}
    assert all(one.grad is not None for one in model.parameters())


@pytest.mark.parametrize("name", ["mlp.gate_proj", "self_attn.o_proj"])
def test_a_weight_that_is_trained_alone_has_its_gradient(name: str) -> None:
    model = small_llama()
    weight = model.get_submodule(f"model.layers.0.{name}").weight.requires_grad_(True)
    tokens = torch.arange(5, device=DEVICE)[None]
    (own,) = torch.autograd.grad(model(tokens).logits.square().sum(), weight)
    fuse(model, OPERATIONS)
    (found,) = torch.autograd.grad(model(tokens).logits.square().sum(), weight)
    torch.testing.assert_close(found, own)


def test_a_model_is_fused_again_for_other_operations() -> None:
    model, first, second = small_llama(), Counted(), Counted()
    fuse(model, first.operations)
    fuse(model, second.operations)
    first.take()
    with torch.no_grad():
        model(torch.arange(5, device=DEVICE)[None])
    assert first.take() == {}
    assert type(model.model.norm).__mro__[1] is LlamaRMSNorm


def test_each_module_of_a_kind_is_judged_by_itself() -> None:
    norms = nn.ModuleList([MambaRMSNormGated(16, 16), MambaRMSNormGated(16, 8)]).to(DEVICE)
    x = random(2, 16)
    own = [norm(x) for norm in norms]
    fuse(norms, OPERATIONS)
    assert [type(norm) is MambaRMSNormGated for norm in norms] == [False, True]
    torch.testing.assert_close([norm(x) for norm in norms], own)


@pytest.mark.parametrize(
    ("module", "offset"),
    [
        (LlamaRMSNorm(16), 0.0),
        (GemmaRMSNorm(16), 1.0),
        (MambaRMSNormGated(16, 16), 0.0),
        (MambaRMSNormGated(16, 8), None),
        (nn.LayerNorm(4096, bias=False), None),
        (nn.LayerNorm(16), None),
        (nn.RMSNorm(16, eps=1e-6), 0.0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_a_module_is_replaced_only_by_what_equals_it(module: nn.Module, offset: Any) -> None:
    kind, x = type(module), random(2, len(module.weight))
    own, state = module(x.cpu()), module.state_dict()
    model = nn.ModuleDict({"norm": module})
    assert (kind.__name__ in fuse(model, OPERATIONS)) == (offset is not None)
    assert (type(module) is not kind) == (offset is not None)
    assert isinstance(module, kind)
    assert type(module).__name__ == kind.__name__
    assert module.state_dict().keys() == state.keys()
    torch.testing.assert_close(module(x.cpu()), own)


@pytest.mark.parametrize(
    ("hidden_act", "is_fused"),
    [("silu", True), ("gelu_pytorch_tanh", True), ("gelu", False), ("relu", False)],
)
def test_a_gate_is_replaced_if_its_activation_is_known(hidden_act: str, is_fused: bool) -> None:
    model, counted = small_llama(hidden_act=hidden_act), Counted()
    tokens = torch.arange(5, device=DEVICE)[None]
    with torch.no_grad():
        own = model(tokens).logits
        fuse(model, counted.operations)
        counted.take()
        torch.testing.assert_close(model(tokens).logits, own)
    assert counted.take().get("gate", 0) == 2 * is_fused


def test_hooks_of_a_norm_that_is_computed_with_a_sum_are_called() -> None:
    """An adapter that has saved a norm replaces its output by a hook."""
    model = small_llama()
    for layer in model.model.layers:
        norm = layer.post_attention_layernorm
        norm.register_forward_hook(lambda _, inputs, y: 2 * y + inputs[0])
    tokens = torch.arange(5, device=DEVICE)[None]
    with torch.no_grad():
        own = model(tokens).logits
        fuse(model, OPERATIONS)
        torch.testing.assert_close(model(tokens).logits, own)


class PartOfAttention(modeling_llama.LlamaDecoderLayer):
    """A layer that passes its attention something else than it was given."""

    def forward(self, hidden_states: Tensor, position_ids: Any = None, **named: Any) -> Tensor:
        return super().forward(hidden_states, position_ids=None, **named)


class ScaledLayer(modeling_llama.LlamaDecoderLayer):
    """A layer that scales what it adds."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return hidden_states + 0.5 * (super().forward(hidden_states, **named) - hidden_states)


@pytest.mark.parametrize("kind", [PartOfAttention, ScaledLayer])
def test_a_layer_of_another_form_is_the_models_own(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", kind)
    model, counted = small_llama(), Counted()
    tokens = torch.arange(5, device=DEVICE)[None]
    with torch.no_grad():
        own = model(tokens).logits
        assert kind.__name__ not in fuse(model, counted.operations)
        counted.take()
        torch.testing.assert_close(model(tokens).logits, own)
    assert "add_norm" not in counted.take()


def test_a_norm_with_a_gate_is_the_models_own() -> None:
    module, x = MambaRMSNormGated(16, 16).to(DEVICE), random(2, 16)
    own = module(x, -x)
    fuse(nn.ModuleDict({"norm": module}), OPERATIONS)
    torch.testing.assert_close(module(x, -x), own)


def test_a_rotation_in_another_order_of_pairs_is_not_replaced() -> None:
    like = torch.zeros(1, device=DEVICE)
    for module, is_replaced in ((modeling_llama, True), (modeling_cohere, False)):
        own = module.apply_rotary_pos_emb
        assert _fuse_rotation(module, like, OPERATIONS) == is_replaced
        assert (module.apply_rotary_pos_emb is not own) == is_replaced
