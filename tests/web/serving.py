"""The page as tests ask it."""

import asyncio
import http.client
import json
from typing import Any, NamedTuple

from ullage.web.jobs import Jobs

QUICK = {"model": "opt-125m", "machine": "h100"}


class Served(NamedTuple):
    """The page: where it is, and what answers."""

    port: int
    jobs: Jobs
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        return f"http://localhost:{self.port}/"

    def ask(self, kind: str, body: Any = None, **headers: str) -> tuple[int, list[dict[str, Any]]]:
        """Return the status and all lines of an answer."""
        text = body if isinstance(body, bytes) else json.dumps(QUICK if body is None else body).encode()
        status, found, _ = self.request("POST", f"/api/{kind}", text, **headers)
        return status, [json.loads(line) for line in found.splitlines()]

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
        connection = http.client.HTTPConnection("localhost", self.port, timeout=300)
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        try:
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()
