"""Adapters over quantised bases compared with PEFT's, in a process that has the libraries.

`python -m tests.support.models.quantized_bases DIRECTORY` prints the comparison of each
quantisation as JSON. `save_example` makes the directory. Where torchao is installed, `transformers`
imports it everywhere, so only this process has it on its path.
"""

import sys
from pathlib import Path
from typing import Final

import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loradock.engine.adapters import LoRARequest
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.models.loading import load_model
from loradock.engine.models.saved_settings import loading_options
from loradock.engine.parallel import ParallelGroup
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.parity_bench import ParityBench, PeftReference
from tests.supported import QUANTIZED_ON_CPU

CONFIG: Final = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
TARGETS: Final = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
PROMPT: Final = (5, 1, 44, 3)
PROJECTION: Final = "model.layers.0.self_attn.q_proj"


class Comparison(msgspec.Struct, frozen=True):
    """Relative errors of logits, and the texts of refusals, of one quantisation.

    `wrapper`: the class of a wrapped projection. `base` and `adapter`: the manager's rows.
    `effect`: the adapter's row relative to the base's. `served`: the largest of both rows of two
    models as a server loads them, quantised while it loads, and saved quantised. `dora`, `split`:
    why each is refused.
    """

    wrapper: str
    base: float
    adapter: float
    effect: float
    served: float
    dora: str
    split: str


def save_example(root: Path) -> None:
    """Save a whole model in `root/model`, and adapters for it each in a folder of its own."""
    torch.manual_seed(3)
    LlamaForCausalLM(CONFIG).save_pretrained(root / "model")
    options = {"plain": {"target_modules": TARGETS, "r": 4, "lora_alpha": 6}}
    options["dora"] = {"target_modules": ["q_proj"], "r": 2, "use_dora": True}
    for name, fields in options.items():
        model = LlamaForCausalLM.from_pretrained(root / "model")
        peft = get_peft_model(model, LoraConfig(init_lora_weights=False, **fields))
        peft.peft_config["default"].init_lora_weights = True
        peft.save_pretrained(root / name / name)


def compare(root: Path, name: str) -> Comparison:
    """Serve the model of `root` quantised, in process and as a server loads it."""
    # Before its first forward, in which a library may pack the weights anew.
    reference = PeftModel.from_pretrained(_quantized(root, name), root / "plain" / "plain").eval()
    peft = PeftReference({"plain": reference})
    manager = LRUCacheLoRAModelManager(
        _quantized(root, name), 4, 64, CONFIG.vocab_size, LoRAConfig(8, 2), "cpu"
    )
    worker = LRUCacheWorkerLoRAManager(manager)
    request = LoRARequest("plain", 1, str(root / "plain" / "plain"))
    index = [0] * len(PROMPT) + [1] * len(PROMPT)
    worker.set_active_adapters([request], LoRAMapping(index, [0, 1], is_prefill=True))
    found = manager.model(torch.tensor([PROMPT] * 2)).logits[:, -1]
    return Comparison(
        type(manager.modules[PROJECTION]).__name__,
        relative_error(found[0], peft.logits(None, PROMPT)),
        relative_error(found[1], peft.logits("plain", PROMPT)),
        relative_error(found[1], found[0]),
        _error_of_served(root, name, peft),
        _refusal_of_dora(worker, root),
        _refusal_of_ranks(root, name),
    )


def _quantized(root: Path, name: str) -> LlamaForCausalLM:
    options = loading_options(name, CONFIG, torch.device("cpu"))
    path = root / "model"
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def _error_of_served(root: Path, name: str, peft: PeftReference) -> float:
    """Return the largest error of a server's models, which `--quantization` or no option loads."""
    _quantized(root, name).save_pretrained(root / name)
    configs = (
        EngineConfig(root / "model", device="cpu", quantization=name),
        EngineConfig(root / name, device="cpu"),
    )
    rows = [("plain", PROMPT), (None, PROMPT)]
    errors = []
    for config in configs:
        served = load_model(config, LoRAConfig(8, 2))
        bench = ParityBench(served, root / "plain", slots=1, device_bytes=1 << 20)
        bench.write(0, "plain")
        for row, found in zip(rows, bench.logits(rows), strict=True):
            errors.append(relative_error(found, peft.logits(*row)))
    return max(errors)


def _refusal_of_dora(worker: LRUCacheWorkerLoRAManager, root: Path) -> str:
    try:
        worker.add_adapter(LoRARequest("dora", 2, str(root / "dora" / "dora")))
    except ValueError as error:
        return str(error)
    return ""


def _refusal_of_ranks(root: Path, name: str) -> str:
    config = EngineConfig(root / "model", device="cpu", quantization=name)
    try:
        load_model(config, LoRAConfig(8), ParallelGroup(0, 2))
    except ValueError as error:
        return str(error)
    return ""


@torch.no_grad()
def main() -> None:
    """Print the comparisons of the directory that is named on the command line."""
    torch.set_num_threads(1)
    found = {name: compare(Path(sys.argv[1]), name) for name in QUANTIZED_ON_CPU}
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
