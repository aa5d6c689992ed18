"""A collector of OpenTelemetry's spans over HTTP, in a thread of the test."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """`spans`: (service, span) pairs in order of arrival."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []

    @property
    def url(self) -> Any:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def of_service(self, service: Any, name: Any) -> Any:
        return [span for of, span in self.spans if (of, span.name) == (service, name)]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {one.key: one.value for one in resource.resource.attributes}
            service = attributes["service.name"].string_value
            for scope in resource.scope_spans:
                self.server.spans += [(service, span) for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


@contextmanager
def collect() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()
