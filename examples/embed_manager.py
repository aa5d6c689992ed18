"""LoRADock inside your own program: one model, several adapters, one batch, no processes.

The shortest program from a `transformers` model to a batch that mixes adapters. For a server with
generation, a log and recovery see `loradock serve`.

    python -m examples.embed_manager
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loradock.engine.adapters import LoRARequest
from loradock.engine.config import LoRAConfig
from loradock.engine.manager import (
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    create_lora_manager,
)
from loradock.engine.punica import LoRAMapping

TINY = Path(__file__).parent / "tiny"
BATCHES = (("upper", "reverse", None), ("double", "caesar", None))
PROMPT = "hello>"
TOKENS = 12


def make_worker() -> LRUCacheWorkerLoRAManager:
    """Return a manager with two device slots and space for three adapters on the host."""
    model = AutoModelForCausalLM.from_pretrained(TINY / "model")
    config = LoRAConfig(max_lora_rank=64, max_loras=2, max_cpu_loras=3)
    manager = create_lora_manager(
        model,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        vocab_size=model.config.vocab_size,
        lora_config=config,
        device="cpu",
        lora_manager_cls=LRUCacheLoRAModelManager,
    )
    return LRUCacheWorkerLoRAManager(manager)


@torch.inference_mode()
def complete(worker: LRUCacheWorkerLoRAManager, names: tuple[str | None, ...]) -> list[str]:
    """Continue the same prompt with each adapter (None: the base model), all in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    known = sorted(path.name for path in (TINY / "adapters").iterdir())
    ids = [0 if name is None else known.index(name) + 1 for name in names]
    requests = [
        LoRARequest(name, adapter_id, str(TINY / "adapters" / name))
        for name, adapter_id in zip(names, ids, strict=True)
        if name is not None
    ]
    rows = torch.tensor([tokenizer(PROMPT)["input_ids"]] * len(names))
    for _ in range(TOKENS):
        # One id per token of the flattened batch and one per row; every step has a new shape.
        index = [adapter_id for adapter_id in ids for _ in range(rows.shape[1])]
        worker.set_active_adapters(requests, LoRAMapping(index, ids, is_prefill=True))
        logits = worker.manager.model(rows).logits[:, -1]
        rows = torch.cat([rows, logits.argmax(-1, keepdim=True)], 1)
    end = tokenizer.eos_token
    texts = [tokenizer.decode(row).removeprefix(tokenizer.bos_token or "") for row in rows]
    return [text.removeprefix(PROMPT).partition(end)[0] for text in texts]


def main() -> None:
    """Run two batches; the second needs the slots of the first one's adapters."""
    worker = make_worker()
    for names in BATCHES:
        for name, text in zip(names, complete(worker, names), strict=True):
            print(f"{name or '(base)':8} {PROMPT}{text}")
    metrics = worker.get_lora_metrics()
    print(f"on the host {sorted(worker.list_adapters())}, {metrics['adapters']}")
    print({name: metrics["performance"][name] for name in ("hits", "misses", "evictions")})


if __name__ == "__main__":
    main()
