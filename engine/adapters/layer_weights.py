"""One module's A and B in host memory, with rank and scaling.

Shapes are checked when they are constructed, so that an existing pair can be multiplied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import TOKEN_ID_DIGITS, WHOLE, ModuleKind, Shard


@dataclass
class LoRALayerWeights:
    """One module's weights: `lora_a` `[rank, in]`, `lora_b` `[out, rank]`.

    The module's delta is `scaling * lora_b @ lora_a`; `scaling` 0 or None: `lora_alpha / rank`.
    For a sharded module both are the parts that `shard` specifies. For kind EXPERTS both have the
    experts as their first dimension. For HEAD they are a layer's weight `[out, in]` and bias
    `[out, 1]`, of rank 1. For TOKENS they are rows `[tokens, in]` and the digits of their ids, and
    `rank` is the number of tokens. Raises `AdapterDoesNotFit` if shapes and rank contradict each
    other.
    """

    module_name: str
    rank: int
    lora_alpha: float
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float = 0.0
    shard: Shard = WHOLE
    kind: ModuleKind = ModuleKind.LINEAR

    def __post_init__(self) -> None:
        if not self._is_sound():
            a, b = list(self.lora_a.shape), list(self.lora_b.shape)
            a_rank = self.shard.a_rank(self.rank)
            raise AdapterDoesNotFit(
                f"{self.module_name} has A {a} and B {b} for rank {self.rank} and kind "
                f"{self.kind.value}; A [{a_rank}, in] and B [out, {self.rank}] are needed"
            )
        self.scaling = self.scaling or self.lora_alpha / self.rank

    def _is_sound(self) -> bool:
        a, b = tuple(self.lora_a.shape), tuple(self.lora_b.shape)
        match self.kind, a, b:
            case ModuleKind.HEAD, (out, _), (height, 1):
                return out == height and self.rank == 1
            case ModuleKind.TOKENS, (count, _), (tokens, digits):
                return count == tokens == self.rank and digits == TOKEN_ID_DIGITS
            case ModuleKind.EXPERTS, (count, a_rank, _), (experts, _, b_rank):
                return (
                    count == experts
                    and a_rank == self.shard.a_rank(self.rank)
                    and (b_rank == self.rank)
                )
            case ModuleKind.LINEAR | ModuleKind.EMBEDDING, (a_rank, _), (_, b_rank):
                return (a_rank, b_rank) == (self.shard.a_rank(self.rank), self.rank)
        return False

    def sharded(self, shard: Shard) -> "LoRALayerWeights":
        """Return the part of whole weights that a process keeps; a copy unless it is the whole."""
        if shard == WHOLE:
            return self
        a, b = shard.select_a(self.lora_a), shard.select_b(self.lora_b)
        return replace(self, lora_a=a.clone(), lora_b=b.clone(), shard=shard)

    @classmethod
    def create_dummy_lora_weights(
        cls,
        module_name: str,
        input_dim: int,
        output_dim: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "LoRALayerWeights":
        """Return weights that change no output."""
        a = torch.zeros(rank, input_dim, dtype=dtype, device=device)
        b = torch.zeros(output_dim, rank, dtype=dtype, device=device)
        return cls(module_name, rank, 1, a, b)

    @property
    def input_dim(self) -> int:
        """The inputs of the module."""
        return self.lora_a.shape[-1]

    @property
    def output_dim(self) -> int:
        """The outputs of the module."""
        return self.lora_b.shape[-2]

    @property
    def is_packed(self) -> bool:
        """False: one A and one B."""
        return False

    @property
    def size_bytes(self) -> int:
        """The size of both tensors."""
        return self.lora_a.nbytes + self.lora_b.nbytes

    def optimize(self) -> "LoRALayerWeights":
        """Multiply B by the scaling, in float32 and rounded once; return these weights."""
        if self.scaling != 1:
            self.lora_b = scaled(self.lora_b, self.scaling).to(self.lora_b.dtype)
            self.scaling = 1.0
        return self


@dataclass
class PackedLoRALayerWeights:
    """The weights of a packed layer, one per slice; None for a child without an adapter."""

    module_name: str
    loras: tuple[LoRALayerWeights | None, ...]

    @classmethod
    def pack(
        cls, loras: Sequence[LoRALayerWeights | None], module_name: str = ""
    ) -> "PackedLoRALayerWeights":
        """Combine the children's weights, shared; ValueError if the adapter touches no child.

        `module_name`: of the packed layer; that of the first child's weights by default.
        """
        names = [lora.module_name for lora in loras if lora]
        if not names:
            raise ValueError("the adapter touches no child of the packed layer")
        return cls(module_name or names[0], tuple(loras))

    @classmethod
    def pack_moe(
        cls,
        loras: Sequence[LoRALayerWeights | None],
        module_name: str,
        is_non_gated_moe: bool = False,
    ) -> "PackedLoRALayerWeights":
        """Stack the weights of single experts by projection, as the slices w1, w2 and w3.

        `loras`: w1 (gate), w2 (down) and w3 (up) of the first expert, then of the next. Experts
        without a gate (`is_non_gated_moe`) have their up projection as w1 and no third slice. A
        slice has A `[experts, rank, in]` and B `[experts, out, rank]` and is named
        `module_name.gate_proj` and so on. Where the experts' scalings differ, they are multiplied
        into the stacked B. Raises `ValueError` for a number of weights that is not a multiple of 3
        or an expert without weights, and `AdapterDoesNotFit` for experts that differ in rank, shape
        or dtype.
        """
        if not loras or len(loras) % 3:
            raise ValueError(
                f"loras must have w1, w2 and w3 of each expert, got {len(loras)} weights"
            )
        gated, plain = ("gate_proj", "down_proj", "up_proj"), ("up_proj", "down_proj")
        slices: list[LoRALayerWeights] = []
        for number, projection in enumerate(plain if is_non_gated_moe else gated):
            found = [lora for lora in loras[number::3] if lora is not None]
            if len(found) < len(loras) // 3:
                raise ValueError(f"{module_name} has experts without {projection}")
            slices.append(stack_experts(f"{module_name}.{projection}", found))
        absent = (None,) if is_non_gated_moe else ()
        return cls(module_name, (*slices, *absent))

    @property
    def is_packed(self) -> bool:
        """True: an A and a B per slice."""
        return True

    @property
    def rank(self) -> int:
        """The highest rank of the children."""
        return max(lora.rank for lora in self.loras if lora)

    @property
    def lora_a(self) -> list[torch.Tensor | None]:
        """A of each child."""
        return [lora.lora_a if lora else None for lora in self.loras]

    @property
    def lora_b(self) -> list[torch.Tensor | None]:
        """B of each child."""
        return [lora.lora_b if lora else None for lora in self.loras]

    @property
    def scaling(self) -> list[float | None]:
        """The scaling of each child."""
        return [lora.scaling if lora else None for lora in self.loras]

    @property
    def size_bytes(self) -> int:
        """The size of all tensors."""
        return sum(lora.size_bytes for lora in self.loras if lora)

    def optimize(self) -> "PackedLoRALayerWeights":
        """Multiply each B by its scaling; return these weights."""
        for lora in self.loras:
            if lora:
                lora.optimize()
        return self


def stack_experts(module_name: str, loras: Sequence[LoRALayerWeights]) -> LoRALayerWeights:
    """Return one projection's weights of all experts, in their order, as one stack.

    A is `[experts, rank, in]` and B `[experts, out, rank]`, copies. Different scalings are
    multiplied into B, in float32 and rounded once. Raises `AdapterDoesNotFit` for experts whose
    matrices can't be in one stack.
    """
    first = loras[0]
    forms = {
        (lora.rank, lora.kind, lora.lora_a.shape, lora.lora_b.shape, lora.lora_a.dtype)
        for lora in loras
    }
    if len(forms) > 1:
        raise AdapterDoesNotFit(
            f"the experts of {module_name} differ in rank, shape or dtype; all of one projection "
            "need the same"
        )
    b, scaling = [lora.lora_b for lora in loras], first.scaling
    if any(lora.scaling != scaling for lora in loras):
        b, scaling = [scaled(one.lora_b, one.scaling).to(one.lora_b.dtype) for one in loras], 1.0
    return replace(
        first,
        module_name=module_name,
        lora_a=torch.stack([lora.lora_a for lora in loras]),
        lora_b=torch.stack(b),
        scaling=scaling,
        kind=ModuleKind.EXPERTS,
    )


def highest_rank(loras: Iterable[LoRALayerWeights]) -> int:
    """Return the highest rank of an adapter's modules; 1 if it has trained tokens alone."""
    return max((lora.rank for lora in loras if lora.kind is not ModuleKind.TOKENS), default=1)


def scaled(lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return `scaling * lora_b` in float32; `lora_b` itself if the scaling is 1."""
    return lora_b if scaling == 1 else lora_b.to(torch.float32) * scaling
