"""The first half of a LoRA product: activations down to the adapter's rank.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is
not: fast. One rule: arithmetic follows each adapter's own rank, not the largest.
"""

from torch import Tensor

from engine.kernels.operands import Groups, LoRASlices


def shrink_reference(
    y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups, scale: float
) -> None:
    """`y[s, t, :rank] = scale * x[t] @ A[s][slot(t)].T`, in place.

    y: [slices, tokens, rank_max] float32 or float64, the accumulator. x: [tokens, in_features].
    Not written: rows of the base model, rows whose adapter has nothing for the slice, and columns
    from the adapter's own rank on.
    """
    for slot, start, end in groups.spans:
        rows = groups.rows[start:end]
        x_rows = x[rows].to(y.dtype)
        for place in range(len(weights.columns)):
            lora_a = weights.lora_a(slot, place)
            if lora_a is not None:
                y[place, rows, : len(lora_a)] = scale * (x_rows @ lora_a.to(y.dtype).T)
