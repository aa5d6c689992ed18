"""The judgement of one causal architecture: the engine's results compared with PEFT's.

Adapters of three ranks are made by PEFT with `target_modules="all-linear"`. The in-process manager
runs one mixed batch of rows of equal lengths; the server's path prefills rows of unlike lengths,
decodes them together, and lets rows join and leave. Each row's logits and tokens must be those of
the model's own `generate` with that adapter.
"""

import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loradock.engine.adapters import LoRARequest
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import EngineError, ModelRefused
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.parity_bench import ServerBench
from tests.support.models.causal_configs import DECODERS, NOT_BUILDABLE, build_model
from tests.support.models.causal_fields import CODEBOOKS
from tests.support.models.common_fields import POSITIONS, VOCABULARY

RANKS: Final = {"rank1": 1, "rank4": 4, "rank8": 8}
ERROR_MAX: Final = 1e-5
STEPS: Final = 24
OTHER_PARTS: Final = ("vision", "visual", "audio", "multi_modal", "image_embed", "cross_attn")
"""Names of parts of models that read images or sound; they have parity tests of their own."""

MAMBAS: Final = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""The types whose `out_proj` PEFT refuses to adapt."""

UNCACHED: Final = ("xlm",)
"""The types whose `generate` is compared without a cache: with one, that of 5.24 skips tokens."""

TOKENS: Final = 11
"""The length of the rows in the manager's batch: longer than windows and chunks."""

LENGTHS: Final = (3, 17, 9, 1, 12, 20)
"""The prompts' lengths in the server's path."""

Verdict = Literal["equal", "refused", "differs", "fails"]


class Outcome(msgspec.Struct, frozen=True):
    """One way's verdict; `text` is the reason, or the largest relative error."""

    verdict: Verdict
    text: str


class Judgement(msgspec.Struct, frozen=True):
    """What became of one architecture; `missing` is why it was not built."""

    model_type: str
    missing: str = ""
    manager: Outcome | None = None
    server: Outcome | None = None
    mode: str = ""


def judge(model_type: str) -> Judgement:
    """Build, adapt, and judge one architecture."""
    if model_type in NOT_BUILDABLE:
        return Judgement(model_type, NOT_BUILDABLE[model_type])
    with TemporaryDirectory() as directory:
        root = Path(directory)
        try:
            reference = Reference(model_type, root)
            reference.forward(None, torch.tensor(prompt_of(0, TOKENS)))
            if model_type not in DECODERS:
                reference.generate(None, prompt_of(0, TOKENS))
        except Exception as error:
            return Judgement(model_type, f"{type(error).__name__}: {error}"[:300])
        modes: list[str] = []
        manager = _outcome(lambda: judge_manager(model_type, root, reference))
        server = _outcome(lambda: judge_server(model_type, root, reference, modes))
        return Judgement(model_type, "", manager, server, "".join(modes))


class Reference:
    """The model with PEFT's adapters, saved under `root`, and its own results."""

    def __init__(self, model_type: str, root: Path) -> None:
        self.model_type = model_type
        model = build_model(model_type)
        transposed = any(isinstance(module, Conv1D) for module in model.modules())
        configs = {
            name: LoraConfig(
                r=rank,
                lora_alpha=2 * rank,
                target_modules="all-linear",
                exclude_modules=_excluded(model),
                init_lora_weights=False,
                fan_in_fan_out=transposed,
                task_type="CAUSAL_LM",
            )
            for name, rank in RANKS.items()
        }
        torch.manual_seed(3)
        first, *rest = configs
        self.model = get_peft_model(model, configs[first], adapter_name=first)
        for name in rest:
            self.model.add_adapter(name, configs[name])
        for config in self.model.peft_config.values():
            config.init_lora_weights = True
        self.model.save_pretrained(root, selected_adapters=list(configs))
        self.model.eval()
        self.names: Sequence[str | None] = (None, *configs)
        self._generated: dict[tuple[str | None, tuple[int, ...]], tuple[Tensor, list[int]]] = {}

    @torch.no_grad()
    def forward(self, name: str | None, tokens: Tensor) -> Tensor:
        """Return one row's logits of all tokens, [tokens, vocabulary]; see `ids_of`."""
        own = inspect.signature(self.model.get_base_model().forward).parameters
        options = {"use_cache": False} if "use_cache" in own else {}
        ids = ids_of(self.model_type, tokens[None])
        output = self._with(name, lambda model: model(input_ids=ids, **options))
        logits: Tensor = output.logits
        return logits.reshape(-1, logits.shape[-1])

    @torch.no_grad()
    def generate(self, name: str | None, prompt: tuple[int, ...]) -> tuple[Tensor, list[int]]:
        """Return the logits, [steps, vocabulary], and the tokens of the model's own `generate`."""
        if (name, prompt) not in self._generated:
            # Some models keep states of the text before in their modules, and clear them so.
            self.forward(name, torch.tensor(prompt))
            options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": -1}
            if self.model_type in UNCACHED:
                options["use_cache"] = False
            found = self._with(
                name,
                lambda model: model.generate(
                    input_ids=torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **options,
                ),
            )
            tokens = found.sequences[0, len(prompt) :].tolist()
            self._generated[name, prompt] = torch.cat(found.logits), tokens
        return self._generated[name, prompt]

    def _with(self, name: str | None, run: Callable[[PreTrainedModel], object]) -> object:
        if name is None:
            with self.model.disable_adapter():
                return run(self.model)
        self.model.set_adapter(name)
        return run(self.model)


@torch.no_grad()
def judge_manager(model_type: str, root: Path, reference: Reference) -> float:
    """Return the largest error of one batch: a row of the base, and one with each adapter."""
    config = LoRAConfig(max_lora_rank=64, max_loras=len(RANKS))
    model = build_model(model_type)
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", VOCABULARY)
    manager = LRUCacheLoRAModelManager(model, 8, 256, vocabulary, config, "cpu")
    worker = LRUCacheWorkerLoRAManager(manager)
    ids = {name: number for number, name in enumerate(RANKS, start=1)}
    rows = [0 if name is None else ids[name] for name in reference.names]
    mapping = LoRAMapping([row for row in rows for _ in range(TOKENS)], rows, is_prefill=True)
    requests = [LoRARequest(name, number, str(root / name)) for name, number in ids.items()]
    worker.set_active_adapters(requests, mapping)
    tokens = torch.tensor([prompt_of(row, TOKENS) for row in range(len(rows))])
    logits = manager.model(input_ids=ids_of(model_type, tokens)).logits
    found = logits.reshape(len(rows), -1, logits.shape[-1])
    return max(
        relative_error(found[row], reference.forward(name, tokens[row]))
        for row, name in enumerate(reference.names)
    )


def judge_server(model_type: str, root: Path, reference: Reference, modes: list[str]) -> float:
    """Return the largest error of rows that are prefilled, decoded, joined and dropped."""
    config = LoRAConfig(max_lora_rank=64, max_loras=len(RANKS))
    model = CausalModel(build_model(model_type), config, max_model_len=POSITIONS)
    modes.append(model.batching)
    bench = ServerBench(model, root, slots=len(RANKS), device_bytes=16 << 20)
    for slot, name in enumerate(RANKS):
        bench.write(slot, name)
    names = reference.names
    rows = [(names[row % len(names)], prompt_of(row, LENGTHS[row])) for row in range(len(LENGTHS))]
    results = [reference.generate(*row) for row in rows]
    found = bench.generate(rows, [tokens for _, tokens in results])
    errors = []
    for logits, (expected, _) in zip(found, results, strict=True):
        errors.append(relative_error(logits, expected[: len(logits)]))
        # The tokens themselves may also be set by a generation configuration.
        if not torch.equal(logits.argmax(-1), expected[: len(logits)].argmax(-1)):
            errors.append(1.0)
    return max(errors)


def _excluded(model: PreTrainedModel) -> list[str] | None:
    """Return the layers that PEFT can't adapt, and those that no text reaches; None for none."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    excluded = [name for name in names if any(part in name for part in OTHER_PARTS)]
    excluded += [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not _returns_tensor(layer)
    ]
    if model.config.model_type in MAMBAS:
        excluded += [name for name in names if name.endswith("out_proj")]
    return excluded or None


def _returns_tensor(layer: nn.Linear) -> bool:
    with torch.no_grad():
        try:
            y = layer(torch.zeros(2, layer.in_features))
            return isinstance(y, Tensor) and y.shape == (2, layer.out_features)
        except RuntimeError:
            return False


def ids_of(model_type: str, tokens: Tensor) -> Tensor:
    """Return the input of rows of tokens [rows, tokens]: for audio, codes of each codebook."""
    if model_type not in DECODERS:
        return tokens
    codes = tokens[:, None] + 5 * torch.arange(CODEBOOKS)[None, :, None]
    return codes.flatten(0, 1) % VOCABULARY


def prompt_of(row: int, length: int) -> tuple[int, ...]:
    """Return the tokens of a row's prompt, which contain no special token."""
    return tuple(3 + (7 * index + 11 * row + index * index) % 80 for index in range(length))


def _outcome(run: Callable[[], float]) -> Outcome:
    try:
        error = run()
    except ModelRefused as refusal:
        return Outcome("refused", str(refusal))
    except EngineError as refusal:
        return Outcome("refused", str(refusal))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return Outcome("fails", f"{type(error).__name__} at {where}: {error}"[:300])
    verdict: Verdict = "equal" if error < ERROR_MAX else "differs"
    return Outcome(verdict, f"{error:.1e}")
