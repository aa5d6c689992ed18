"""An adapter that is unloaded over HTTP while a request for it waits, through real processes."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from controller.client import Client
from tests.support.engine.serve_process import gateway_url, serve, wait_for_gateway
from tests.support.waiting import HANG_S, wait_until

# Without turns, the adapter in the only slot stays there until its requests have ended.
OPTIONS = (
    "--slots",
    "1",
    "--slot-quantum-ms",
    "0",
    "--max-lora-rank",
    "64",
    "--http",
    "127.0.0.1:0",
)


def test_a_request_that_waits_for_its_slot_is_served_after_the_unload(tmp_path):
    directory = tmp_path / "d"
    with (
        serve(directory, *OPTIONS, "--allow-runtime-lora-updating"),
        Client(directory, timeout_s=HANG_S) as controller,
        ThreadPoolExecutor() as threads,
    ):
        wait_for_gateway(directory)
        with httpx.Client(base_url=gateway_url(directory), timeout=HANG_S) as http:

            def complete(adapter: str) -> httpx.Response:
                body = {"model": adapter, "prompt": "hello>", "max_tokens": 16, "temperature": 0}
                return http.post("/v1/completions", json=body)

            for name in ("reverse", "upper"):
                body = {"lora_name": name, "lora_path": name}
                assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
            running = controller.generate("hello>", "reverse", max_tokens=400, ignore_eos=True)
            next(iter(running))
            waiting = threads.submit(complete, "upper")
            wait_until(lambda: controller.show("upper").waiting == 1)
            unload = threads.submit(
                http.post, "/v1/unload_lora_adapter", json={"lora_name": "upper"}
            )
            # The name is free at once, and the request that came before is still waiting.
            wait_until(lambda: complete("upper").status_code == 404)
            assert not waiting.done()
            running.close()
            assert waiting.result().json()["choices"][0]["text"] == "HELLO"
            assert unload.result().status_code == 200
            assert complete("upper").status_code == 404
