"""Programs as users write them, with the client libraries of other projects, on real servers.

Each file in `programs` is one test per version of its library. `make clients` installs the
libraries, in environments of their own; without these the tests are skipped.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from tests.support.engine.serve_process import serve, wait_for_gateway
from tests.support.parallel.processes import ROOT, TINY
from tests.support.waiting import HANG_S

HERE: Final = Path(__file__).parent
ENVIRONMENTS: Final = ROOT / ".venv-clients"
VERSIONS: Final = {"openai": ("openai-2", "openai-3"), "instructor": ("openai-2",)}
"""The environments by the first word of a program's name; `openai-3` for all others."""

CASES: Final = [
    pytest.param(program, environment, id=f"{program.stem}-{environment}")
    for program in sorted((HERE / "programs").glob("*.py"))
    for environment in VERSIONS.get(program.stem.split("_")[0], ("openai-3",))
]
KEY: Final = "secret"
ADAPTERS: Final = ("reverse", "upper", "spell")
# More adapters than slots.
OPTIONS: Final = (
    *("--http", "127.0.0.1:0", "--api-key", KEY, "--max-loras", "2", "--max-lora-rank", "64"),
    *("--chat-template", str(HERE / "chat_template.jinja")),
    "--enable-tokenizer-info-endpoint",
)
TOOLS: Final = (
    *("--adapter-root", str(TINY / "tools"), "--lora-modules", "caller=caller"),
    *("--lora-modules", "reverse=reverse"),
    *("--chat-template", str(TINY / "tools" / "chat_template.jinja")),
)
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class Servers:
    """Servers of the tiny model and of an embedding one, started when they are first needed."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._urls: dict[str, str] = {}
        self._starts: dict[str, Callable[[], str]] = {
            "BASE_URL": lambda: self._serve_adapters("usual"),
            "SHORT_BASE_URL": lambda: self._serve_adapters("short", "--max-model-len", "64"),
            "TOOLS_BASE_URL": lambda: self._serve("tools", TINY / "model", *TOOLS),
            "EMBED_BASE_URL": self._serve_embeddings,
        }

    def urls_for(self, program: str) -> dict[str, str]:
        """Return the address of each server whose variable occurs in a program's text."""
        needed = [name for name in self._starts if re.search(rf"\b{name}\b", program)]
        for name in needed:
            self._urls[name] = self._urls.get(name) or self._starts[name]()
        return {name: self._urls[name] for name in needed}

    def _serve_adapters(self, name: str, *options: str) -> str:
        modules = [word for name in ADAPTERS for word in ("--lora-modules", f"{name}={name}")]
        return self._serve(name, TINY / "model", *options, *modules)

    def _serve_embeddings(self) -> str:
        model = self._directory / "embedder"
        save_embedder(model)
        return self._serve("embeddings", model)

    def _serve(self, name: str, model: Path, *options: str) -> str:
        directory = self._directory / name
        self._stack.enter_context(serve(directory, *OPTIONS, *options, model=model))
        return f"{wait_for_gateway(directory)}v1"


def save_embedder(directory: Path) -> None:
    """Save a random model that embeds, with the tiny model's tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    limits = {"vocab_size": 259, "max_position_embeddings": 64, "pad_token_id": 256}
    Qwen3Model(Qwen3Config(**sizes, **heads, **limits)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "model" / name, directory / name)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("cl"), stack)


@pytest.mark.parametrize(("program", "environment"), CASES)
def test_a_program(servers: Servers, tmp_path: Path, program: Path, environment: str) -> None:
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not (ENVIRONMENTS / environment / ".installed").exists():
        pytest.skip("the client libraries are not installed; see `make clients`")
    names = {"API_KEY": KEY, "MODEL": "reverse", "BASE_MODEL": "model", "HF_HOME": str(tmp_path)}
    names["MODEL_DIRECTORY"] = str(TINY / "model")
    given = OFFLINE | names | servers.urls_for(program.read_text())
    code, output = run_alone([python, program], os.environ | given)
    assert code == 0, output[-5000:]


def run_alone(command: list[Path], variables: dict[str, str]) -> tuple[int, str]:
    """Run a program that hangs at most `HANG_S`; no process that it starts outlives it."""
    process = subprocess.Popen(
        command,
        cwd=HERE,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=HANG_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output
