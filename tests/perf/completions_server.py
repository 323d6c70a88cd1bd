"""A real HTTP server with the completions endpoint; what it answers is the test's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Request = dict[str, Any]
Reply = Callable[[Request], tuple[int, bytes]]


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # the default of 5 makes the sixth client at once wait a second
    daemon_threads = False  # closing waits for what still runs

    def handle_error(self, *args: object) -> None:
        """A client that hung up before its answer is no news."""


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """The base URL of a server that answers every request's JSON with `reply`'s status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = reply(request) if self.path == "/v1/completions" else (404, b"no such path")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str, tokens: int | None = None, finish_reason: str = "stop") -> tuple[int, bytes]:
    """A good answer, as OpenAI's server words it."""
    answer: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
    if tokens is not None:
        answer["usage"] = {"completion_tokens": tokens}
    return 200, json.dumps(answer).encode()
