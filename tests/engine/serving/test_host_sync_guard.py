"""Operations for which the host waits for the device are detected, however they are called."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm, one_hot, scaled_dot_product_attention

from loradock.engine.serving.decoding import ForbidHostSync, HostSync

READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 2).any()),
    "comparison": lambda x: 1 if x[0] > 1 else 0,
    "int": lambda x: int(x[0]),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "mask": lambda x: x[x > 1],
    "mask_written": lambda x: x.index_put_((x > 1,), torch.ones(2)),
    "range": lambda x: torch.arange(x[1].long()),
    "slice": lambda x: x[: x[2].long()],
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "one_hot": lambda x: one_hot(x.long()),
}
PASSES = {
    "index": lambda x: x[x.long()],
    "index_written": lambda x: x.index_put_((x.long(),), torch.ones(4)),
    "mask_filled": lambda x: x.index_put_((x > 1,), torch.tensor(0.0)),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "where_of_three": lambda x: torch.where(x > 1, x, 0),
    "sort": lambda x: x.sort(stable=True),
    "searchsorted": lambda x: torch.searchsorted(x, x),
    "product": lambda x: torch.nn.functional.linear(x[None], x[None]),
    "attention": lambda x: scaled_dot_product_attention(*3 * [x.view(1, 1, 1, 4)]),
}


def run(work: Callable[[Tensor], object], inference: bool) -> None:
    x = torch.arange(4.0)
    with ForbidHostSync(x.device), torch.inference_mode(inference):
        work(x)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", READS)
def test_a_read_raises(name: str, inference: bool) -> None:
    with pytest.raises(HostSync, match="aten"):
        run(READS[name], inference)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", PASSES)
def test_work_on_the_device_alone_passes(name: str, inference: bool) -> None:
    run(PASSES[name], inference)


# "meta" is the only other device that every machine has; its tensors have no values.
META = torch.device("meta")


@pytest.mark.parametrize("inference", [True, False])
def test_tensors_on_the_host_may_be_read(inference: bool) -> None:
    x = torch.arange(4.0)
    with ForbidHostSync(META), torch.inference_mode(inference):
        for read in READS.values():
            read(x.clone())
        (torch.zeros(3, device=META) + torch.tensor(1.0)).to(torch.float16)
        with pytest.raises(HostSync, match="reads"):
            bool(torch.zeros(1, device=META) > 0)


@pytest.mark.parametrize("inference", [True, False])
def test_a_copy_between_host_and_device_raises(inference: bool) -> None:
    x = torch.zeros(3)
    with ForbidHostSync(META), torch.inference_mode(inference):
        for copy in (lambda: x.to(META), lambda: torch.zeros(3, device=META).copy_(x)):
            with pytest.raises(HostSync, match="copies"):
                copy()


@pytest.mark.parametrize(
    ("dtype", "capability", "reads"),
    [
        (torch.bfloat16, (9, 0), False),
        (torch.bfloat16, (10, 0), False),
        (torch.bfloat16, (8, 0), True),
        (torch.bfloat16, (12, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), True),
    ],
)
def test_a_grouped_matmul_reads_where_pytorch_has_no_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], reads: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    with FakeTensorMode():
        x, matrices = (
            torch.empty(size, dtype=dtype, device="cuda") for size in ((8, 16), (2, 16, 32))
        )
        ends = torch.empty(2, dtype=torch.int32, device="cuda")
        with pytest.raises(HostSync) if reads else nullcontext(), ForbidHostSync(x.device):
            grouped_mm(x, matrices, offs=ends)
