"""The shapes, ranks and seeds of the tiny model and its adapters, and their tokenizer.

Everything that a reader may want to change about the trained model is a value in this file.
"""

from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

SEED = 20250

TINY_DIRECTORY = Path(__file__).parent / "tiny"
MODEL_DIRECTORY = TINY_DIRECTORY / "model"
ADAPTERS_DIRECTORY = TINY_DIRECTORY / "adapters"
RESULTS_FILE = TINY_DIRECTORY / "results.json"
TOOL_CALLER_DIRECTORY = TINY_DIRECTORY / "tools" / "caller"

BASE_NAME = "loradock/tiny"

# A byte's token id is the byte itself; the special tokens follow.
BYTES = 256
PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|pad|>", "<|bos|>", "<|eos|>"
CONTEXT_TOKENS_MAX = 512

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR = ATTENTION + FEED_FORWARD

# Only the training of the base uses tags: after a tag the base performs the transformation, without
# one it copies the word. An adapter then only has to learn to do without the tag.
TAGS = {
    "upper": "^",
    "reverse": "<",
    "caesar": "+",
    "devowel": "~",
    "double": "=",
    "count": "#",
    "piglatin": "&",
    "spell": "-",
}


@dataclass(frozen=True)
class AdapterRecipe:
    """The shape of one adapter; its name is that of the transformation that it learns."""

    name: str
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    use_rslora: bool = False

    def lora_config(self) -> LoraConfig:
        """Return the configuration for peft: no dropout, no bias, no further modules."""
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.target_modules),
            use_rslora=self.use_rslora,
        )


# Ranks, scalings and targets differ on purpose: an engine that confuses two adapters, or forgets a
# scaling, generates visibly wrong words.
ADAPTERS = (
    AdapterRecipe("upper", rank=4, alpha=16, target_modules=ALL_LINEAR),
    AdapterRecipe("reverse", rank=64, alpha=16, target_modules=ATTENTION, use_rslora=True),
    AdapterRecipe("caesar", rank=8, alpha=32, target_modules=FEED_FORWARD),
    AdapterRecipe("devowel", rank=16, alpha=16, target_modules=ALL_LINEAR),
    AdapterRecipe("double", rank=24, alpha=48, target_modules=("q_proj", "v_proj", "o_proj")),
    AdapterRecipe("count", rank=12, alpha=24, target_modules=ALL_LINEAR),
    AdapterRecipe("piglatin", rank=32, alpha=48, target_modules=ALL_LINEAR),
    AdapterRecipe("spell", rank=8, alpha=8, target_modules=ALL_LINEAR),
)

# It is no transformation, so it is trained and measured by `train_tool_caller`.
TOOL_CALLER = AdapterRecipe("caller", rank=8, alpha=16, target_modules=ALL_LINEAR)


def model_config() -> LlamaConfig:
    """Return a Llama of 0.8 million parameters with fewer key-value heads than query heads."""
    return LlamaConfig(
        vocab_size=BYTES + 3,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS_MAX,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are the UTF-8 bytes of the text, without special tokens."""
    backend = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Added in the order of their ids: the backend numbers them from 256.
    backend.add_special_tokens([PAD_TOKEN, BOS_TOKEN, EOS_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        model_max_length=CONTEXT_TOKENS_MAX,
        clean_up_tokenization_spaces=False,
    )


def _byte_vocabulary() -> dict[str, int]:
    """Return the printable symbol of the ByteLevel pre-tokenizer for each byte, as in GPT-2.

    A printable byte is its own symbol; the others are numbered from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(BYTES) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols |= {byte: chr(BYTES + index) for index, byte in enumerate(others)}
    return {symbols[byte]: byte for byte in range(BYTES)}
