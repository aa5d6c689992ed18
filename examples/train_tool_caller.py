"""Training of a tiny adapter that calls tools, on the base of `train_tiny`.

The chat template shows it the name of a tool and a word, and it calls the tool with the word, in
the format of Hermes. It repeats what a tool returned. One thread of a CPU takes about five
minutes:

    python -m examples.train_tool_caller
"""

import json
import random
import sys

import torch
from peft import PeftModel, get_peft_model
from rich.console import Console
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.measure_tiny import generate_from
from examples.tiny_recipe import (
    MODEL_DIRECTORY,
    SEED,
    TOOL_CALLER,
    TOOL_CALLER_DIRECTORY,
)
from examples.train_tiny import Example, Schedule, save_adapter, train
from examples.transformations import answer_of, held_out_words, training_word

SCHEDULE = Schedule(steps=900, batch_examples=32, learning_rate=4e-3, warm_up_steps=20)
TOOLS = ("reverse", "upper")
RESPONSES_SHARE = 0.1
WORDS = 100
EXACT_MIN = 0.9


def main() -> int:
    """Train, save and measure the adapter; returns 1 if too few of its outputs are right."""
    torch.set_num_threads(1)
    disable_progress_bar()
    console = Console()
    torch.manual_seed(SEED)
    base = LlamaForCausalLM.from_pretrained(MODEL_DIRECTORY)
    model = get_peft_model(base, TOOL_CALLER.lora_config())
    train(model, draw_example, SCHEDULE, console)
    save_adapter(model, TOOL_CALLER_DIRECTORY)
    exact = measure()
    console.print(f"exact match on {WORDS} held-out words: {exact:.1%}")
    return 0 if exact >= EXACT_MIN else 1


def draw_example(generator: random.Random) -> Example:
    """Draw a word to call a tool with, or a tool's answer to repeat."""
    word = training_word(generator)
    if generator.random() < RESPONSES_SHARE:
        answer = answer_of(generator.choice(TOOLS), word)
        return f"<tool_response>{answer}>", answer
    return call_example(generator.choice(TOOLS), word)


def call_example(tool: str, word: str) -> Example:
    """Return the prompt with this tool and word, and the call."""
    call = json.dumps({"name": tool, "arguments": {"word": word}})
    return f"<tool_call>{tool}:{word}>", f"<tool_call>{call}</tool_call>"


def measure() -> float:
    """Return the share of held-out words for which the saved adapter's output is right."""
    words = held_out_words(WORDS)
    examples = [call_example(TOOLS[at % len(TOOLS)], word) for at, word in enumerate(words)]
    base = LlamaForCausalLM.from_pretrained(MODEL_DIRECTORY)
    model = PeftModel.from_pretrained(base, TOOL_CALLER_DIRECTORY)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    outputs = generate_from(model, tokenizer, [prompt for prompt, _ in examples], 256)
    answers = [answer for _, answer in examples]
    return sum(map(str.__eq__, outputs, answers)) / len(examples)


if __name__ == "__main__":
    sys.exit(main())
