"""Measurement of the saved tiny adapters on words that were not used in training.

It uses plain transformers and peft, greedy, one adapter at a time. The base alone is measured on
the same words, because an adapter proves nothing where the base is right too.

    python -m examples.measure_tiny
"""

import json
import sys
from dataclasses import asdict, dataclass

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as TokenizerBase
from transformers.utils.logging import disable_progress_bar

from examples.tiny_recipe import (
    ADAPTERS,
    ADAPTERS_DIRECTORY,
    MODEL_DIRECTORY,
    RESULTS_FILE,
    AdapterRecipe,
)
from examples.transformations import (
    ANSWER_BYTES_MAX,
    TRANSFORMATIONS,
    answer_of,
    held_out_words,
    prompt_of,
)

WORDS = 500
BATCH_WORDS = 100
EXACT_ADAPTER_MIN = 0.95
EXACT_BASE_MAX = 0.05


@dataclass(frozen=True)
class Result:
    """The figures of one adapter; the two exact matches are shares of `words` from 0 to 1."""

    adapter: str
    transformation: str
    rank: int
    alpha: int
    use_rslora: bool
    target_modules: tuple[str, ...]
    exact_match_adapter: float
    exact_match_base: float
    words: int

    @property
    def is_good(self) -> bool:
        """Whether the adapter is right often enough and the base alone seldom enough."""
        adapter_is_right = self.exact_match_adapter >= EXACT_ADAPTER_MIN
        return adapter_is_right and self.exact_match_base <= EXACT_BASE_MAX


def main() -> int:
    """Measure, print the table, write the results; returns 1 if a figure misses its bound."""
    torch.set_num_threads(2)
    disable_progress_bar()
    results = measure_all()
    print_table(Console(), results)
    write_results(results)
    return 0 if all(result.is_good for result in results) else 1


def measure_all() -> list[Result]:
    """Measure every adapter of the recipe on the same held-out words."""
    words = held_out_words(WORDS)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    base_outputs = generate(_load_base(), tokenizer, words)
    results = []
    for recipe in ADAPTERS:
        model = PeftModel.from_pretrained(_load_base(), ADAPTERS_DIRECTORY / recipe.name)
        outputs = generate(model, tokenizer, words)
        results.append(_result(recipe, words, outputs, base_outputs))
    return results


def generate(
    model: PreTrainedModel | PeftModel, tokenizer: TokenizerBase, words: list[str]
) -> list[str]:
    """Return the model's output per word."""
    # One token more than the longest answer, so that a missing end makes the answer wrong.
    return generate_from(model, tokenizer, [*map(prompt_of, words)], ANSWER_BYTES_MAX + 1)


@torch.inference_mode()
def generate_from(
    model: PreTrainedModel | PeftModel,
    tokenizer: TokenizerBase,
    prompts: list[str],
    tokens_max: int,
) -> list[str]:
    """Return the model's output per prompt: greedy, left-padded batches, no special tokens."""
    model.eval()
    outputs: list[str] = []
    for start in range(0, len(prompts), BATCH_WORDS):
        batch = tokenizer(prompts[start : start + BATCH_WORDS], return_tensors="pt", padding=True)
        tokens = model.generate(**batch, max_new_tokens=tokens_max, do_sample=False)
        answers = tokens[:, batch["input_ids"].shape[1] :]
        outputs += tokenizer.batch_decode(answers, skip_special_tokens=True)
    return outputs


def print_table(console: Console, results: list[Result]) -> None:
    """Print the results as a table."""
    table = Table(title=f"exact match on {WORDS} held-out words")
    for column in ("adapter", "rank", "alpha", "targets", "adapter on", "base alone"):
        table.add_column(column)
    for result in results:
        table.add_row(
            result.adapter,
            str(result.rank),
            f"{result.alpha}{' rslora' if result.use_rslora else ''}",
            ", ".join(name.removesuffix("_proj") for name in result.target_modules),
            f"{result.exact_match_adapter:.1%}",
            f"{result.exact_match_base:.1%}",
            style="" if result.is_good else "bold red",
        )
    console.print(table)


def write_results(results: list[Result]) -> None:
    """Write the results to a file next to the model."""
    RESULTS_FILE.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def _load_base() -> PreTrainedModel:
    # Loaded again for every adapter: peft changes the base in place.
    return AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY)


def _result(
    recipe: AdapterRecipe, words: list[str], outputs: list[str], base_outputs: list[str]
) -> Result:
    right = [answer_of(recipe.name, word) for word in words]
    return Result(
        adapter=recipe.name,
        transformation=_description(TRANSFORMATIONS[recipe.name].__doc__),
        rank=recipe.rank,
        alpha=recipe.alpha,
        use_rslora=recipe.use_rslora,
        target_modules=recipe.target_modules,
        exact_match_adapter=_share_equal(outputs, right),
        exact_match_base=_share_equal(base_outputs, right),
        words=len(words),
    )


def _share_equal(outputs: list[str], right: list[str]) -> float:
    return sum(map(str.__eq__, outputs, right)) / len(right)


def _description(docstring: str | None) -> str:
    return (docstring or "").replace("`", "").strip()


if __name__ == "__main__":
    sys.exit(main())
