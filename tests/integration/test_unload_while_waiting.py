"""An adapter that is unloaded over HTTP while a request for it waits, through real processes."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx

from loradock.client import Client
from tests.support.engine.serve_process import serve, wait_for_gateway
from tests.support.waiting import HANG_S, wait_until

# A stopped engine counts as hanging after longer than the test may take.
OPTIONS = ("--max-lora-rank", "64", "--http", "127.0.0.1:0", "--hang-timeout", f"{2 * HANG_S}")


def test_a_request_that_waits_for_its_slot_is_served_although_its_adapter_is_unloaded(tmp_path):
    directory = tmp_path / "d"
    with (
        serve(directory, *OPTIONS, "--allow-runtime-lora-updating"),
        httpx.Client(base_url=wait_for_gateway(directory), timeout=HANG_S) as http,
        Client(directory, timeout_s=HANG_S) as controller,
        ThreadPoolExecutor() as threads,
    ):

        def complete() -> httpx.Response:
            body = {"model": "upper", "prompt": "hello>", "max_tokens": 16, "temperature": 0}
            return http.post("/v1/completions", json=body)

        named = {"lora_name": "upper"}
        loaded = http.post("/v1/load_lora_adapter", json={**named, "lora_path": "upper"})
        assert loaded.status_code == 200, loaded.text
        engine = controller.status().engine_pid
        os.kill(engine, signal.SIGSTOP)
        waiting = threads.submit(complete)
        wait_until(lambda: [one for one in controller.list().adapters if one.waiting])
        unload = threads.submit(http.post, "/v1/unload_lora_adapter", json=named)
        wait_until(lambda: all(one.retired for one in controller.list().adapters))
        # The name is free at once, and the request that came before still waits.
        assert complete().status_code == 404
        assert not waiting.done()
        os.kill(engine, signal.SIGCONT)
        assert waiting.result().json()["choices"][0]["text"] == "HELLO"
        assert unload.result().status_code == 200
        assert complete().status_code == 404
