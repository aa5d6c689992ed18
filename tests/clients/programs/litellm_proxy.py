"""litellm's proxy in front of two servers, as a process, used with `openai`.

A prompt that does not fit the short context is answered by `context_window_fallbacks`.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai

MODEL = os.environ["MODEL"]
KEY = "sk-proxy"
HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "a" * 100}]
OPTIONS = {"temperature": 0, "max_tokens": 16}


def deployment(name: str, address: str) -> dict:
    params = {"model": f"openai/{MODEL}", "api_base": address, "api_key": os.environ["API_KEY"]}
    return {"model_name": name, "litellm_params": params}


CONFIG = {
    "model_list": [
        deployment("short", os.environ["SHORT_BASE_URL"]),
        deployment("long", os.environ["BASE_URL"]),
    ],
    "router_settings": {"context_window_fallbacks": [{"short": ["long"]}], "num_retries": 0},
    "general_settings": {"master_key": KEY},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(process: subprocess.Popen, url: str) -> None:
    """Wait as long as the process lives; whoever runs this program bounds the time."""
    while True:
        assert process.poll() is None, "the proxy has ended"
        try:
            urllib.request.urlopen(f"{url}/health/readiness").read()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


def use(client: openai.OpenAI) -> None:
    for name in ("short", "long"):
        answer = client.chat.completions.create(model=name, messages=HELLO, **OPTIONS)
        assert answer.choices[0].message.content == "olleh"
    stream = client.chat.completions.create(model="long", messages=HELLO, stream=True, **OPTIONS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "olleh"
    answer = client.chat.completions.create(model="short", messages=LONG, **OPTIONS)
    assert answer.usage.prompt_tokens > len(LONG[0]["content"])


def main() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        # YAML contains JSON.
        config.write_text(json.dumps(CONFIG))
        command = [Path(sys.executable).with_name("litellm"), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        process = subprocess.Popen(command)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            use(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0))
        finally:
            process.terminate()
            process.wait()


main()
