"""Fused kernels against the formulas of models, and which modules they stand in for."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from loradock.engine.kernels.interface import FusedOperations
from loradock.engine.models.fusing import _fuse_rotation, fuse
from loradock.engine.models.observation import relative_difference

triton = pytest.importorskip("triton")
fused = pytest.importorskip("loradock.engine.kernels.gpu.fused")

pytestmark = pytest.mark.skipif(
    not (triton.knobs.runtime.interpret or torch.cuda.is_available()),
    reason="needs TRITON_INTERPRET or a GPU",
)
OPERATIONS = FusedOperations(fused.rms_norm, fused.rotate)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROTATION = "apply_rotary_pos_emb"
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
    """The operations, and how often each was called."""

    def __init__(self) -> None:
        self.norms = self.rotations = 0
        self.operations = FusedOperations(self._norm, self._rotate)

    def _norm(self, *operands: Any) -> Tensor:
        self.norms += 1
        return OPERATIONS.rms_norm(*operands)

    def _rotate(self, *operands: Any) -> tuple[Tensor, Tensor]:
        self.rotations += 1
        return OPERATIONS.rotate(*operands)


@pytest.fixture(autouse=True)
def own_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo after each test what is replaced in a module."""
    for module in (modeling_llama, modeling_cohere):
        monkeypatch.setattr(module, ROTATION, inspect.unwrap(getattr(module, ROTATION)))


def small_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)
    return LlamaForCausalLM(config).to(DEVICE).eval().requires_grad_(False)


def test_a_model_runs_fused_and_computes_the_same() -> None:
    model, counted = small_llama(), Counted()
    tokens = torch.arange(5, device=DEVICE)[None]
    with torch.no_grad():
        own = model(tokens).logits
        assert fuse(model, counted.operations) == ("LlamaRMSNorm", ROTATION)
        checks = counted.norms, counted.rotations
        torch.testing.assert_close(model(tokens).logits, own)
    assert (counted.norms - checks[0], counted.rotations - checks[1]) == (5, 2)


def test_what_needs_a_gradient_is_the_models_own() -> None:
    """A rotation is replaced for all models of a module, one that is trained included."""
    model, counted = small_llama(), Counted()
    fuse(model, counted.operations)
    checks = counted.norms, counted.rotations
    model.requires_grad_(True)
    model(torch.arange(5, device=DEVICE)[None]).logits.sum().backward()
    assert (counted.norms, counted.rotations) == checks
    assert all(one.grad is not None for one in model.parameters())


def test_a_model_is_fused_again_for_other_operations() -> None:
    model, first, second = small_llama(), Counted(), Counted()
    fuse(model, first.operations)
    fuse(model, second.operations)
    checks = first.norms + first.rotations
    with torch.no_grad():
        model(torch.arange(5, device=DEVICE)[None])
    assert first.norms + first.rotations == checks
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
