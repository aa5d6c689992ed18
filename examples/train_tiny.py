"""Training of the tiny model and its adapters from random weights, and their measurement.

Not a general trainer: one seed, one recipe, two threads of one CPU. Every random choice depends on
the seed, so a second run on the same machine writes the same files.

    python -m examples.train_tiny
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from rich.console import Console
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from examples import measure_tiny
from examples.tiny_recipe import (
    ADAPTERS,
    ADAPTERS_DIRECTORY,
    BASE_NAME,
    BOS_ID,
    EOS_ID,
    MODEL_DIRECTORY,
    PAD_ID,
    SEED,
    TAGS,
    AdapterRecipe,
    build_tokenizer,
    model_config,
)
from examples.transformations import answer_of, prompt_of, training_word

IGNORED_LABEL = -100
REPORT_EVERY_STEPS = 100

Example = tuple[str, str]
Draw = Callable[[random.Random], Example]


@dataclass(frozen=True)
class Schedule:
    """The length and learning rate of one training: linear warm-up, then linear decay to zero."""

    steps: int
    batch_examples: int
    learning_rate: float
    warm_up_steps: int

    def share_of_rate(self, step: int) -> float:
        """Return the share of the learning rate at step `step`, counted from 0."""
        rising = (step + 1) / self.warm_up_steps
        falling = (self.steps - step) / (self.steps - self.warm_up_steps)
        return min(rising, falling)


BASE_SCHEDULE = Schedule(steps=2500, batch_examples=96, learning_rate=3e-3, warm_up_steps=100)
ADAPTER_SCHEDULE = Schedule(steps=600, batch_examples=64, learning_rate=4e-3, warm_up_steps=20)


def main() -> int:
    """Train, save and measure everything; returns 1 if the adapters or the base miss a bound."""
    torch.set_num_threads(2)
    disable_progress_bar()
    console = Console()
    started = time.monotonic()
    train_base(console)
    for recipe in ADAPTERS:
        train_adapter(recipe, console)
    console.print(f"trained in {(time.monotonic() - started) / 60:.1f} minutes")
    return measure_tiny.main()


def train_base(console: Console) -> None:
    """Train the base on copying and, after a tag, on every transformation; save it."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(model_config())
    console.rule(f"base, {model.num_parameters():,} parameters")
    train(model, draw_for_base, BASE_SCHEDULE, console)
    model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID
    )
    shutil.rmtree(MODEL_DIRECTORY, ignore_errors=True)
    model.save_pretrained(MODEL_DIRECTORY)
    build_tokenizer().save_pretrained(MODEL_DIRECTORY)
    # A name that transformers 4 knows too; version 5 writes a class that only version 5 has.
    rewrite_json(
        MODEL_DIRECTORY / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}
    )


def train_adapter(recipe: AdapterRecipe, console: Console) -> None:
    """Train one adapter on the saved base, without the tag, and save it."""
    console.rule(f"{recipe.name}, rank {recipe.rank}")
    # Seeded again for each adapter, so that one that is trained alone has the same weights.
    torch.manual_seed(SEED)
    base = LlamaForCausalLM.from_pretrained(MODEL_DIRECTORY)
    model = get_peft_model(base, recipe.lora_config())

    def draw(generator: random.Random) -> Example:
        word = training_word(generator)
        return prompt_of(word), answer_of(recipe.name, word)

    train(model, draw, ADAPTER_SCHEDULE, console)
    save_adapter(model, ADAPTERS_DIRECTORY / recipe.name)


def draw_for_base(generator: random.Random) -> Example:
    """Draw a plain word to copy or a tagged one to transform, each task equally often."""
    word = training_word(generator)
    name = generator.choice(["copy", *TAGS])
    if name == "copy":
        return prompt_of(word), word
    return TAGS[name] + prompt_of(word), answer_of(name, word)


def train(
    model: PreTrainedModel | PeftModel, draw: Draw, schedule: Schedule, console: Console
) -> None:
    """Train in place the parameters that require a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=schedule.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    rate = LambdaLR(optimizer, schedule.share_of_rate)
    generator = random.Random(SEED)
    started = time.monotonic()
    model.train()
    for step in range(1, schedule.steps + 1):
        tokens, labels = batch_of(draw(generator) for _ in range(schedule.batch_examples))
        # No mask: padding is on the right here, where a causal model does not see it.
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rate.step()
        if step % REPORT_EVERY_STEPS == 0:
            elapsed = time.monotonic() - started
            console.print(f"step {step:>5}  loss {loss.item():.4f}  {elapsed:>6.1f} s")


def batch_of(examples: Iterable[Example]) -> tuple[Tensor, Tensor]:
    """Return tokens and labels: [examples, longest] int64; only the answer and its end count."""
    pairs = [(list(prompt.encode()), [*answer.encode(), EOS_ID]) for prompt, answer in examples]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((len(pairs), longest), PAD_ID)
    labels = torch.full((len(pairs), longest), IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Save as peft does, without what names this machine or differs between runs."""
    shutil.rmtree(directory, ignore_errors=True)
    # The vocabulary is unchanged; the default would search the hub for the base to find out.
    model.save_pretrained(str(directory), save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)
    # peft keeps the targets in a set, whose order differs between processes.
    targets = sorted(model.peft_config["default"].target_modules)
    rewrite_json(
        directory / "adapter_config.json",
        {"base_model_name_or_path": BASE_NAME, "target_modules": targets},
    )


def rewrite_json(file: Path, changes: dict[str, object]) -> None:
    """Replace top-level values of a JSON file in place."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
