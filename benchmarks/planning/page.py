"""How long until the page answers? ``python benchmarks/planning/page.py``.

A new server is asked common questions in turn, each of them once, so that none is in its cache. Times are those of a
visitor: from the request until the first answer, which is of a short search, and until the last.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.origin import origin, write_result

HERE = Path(__file__).parents[2]
OUTPUT = HERE / "benchmarks" / "results" / "page.json"
QUESTIONS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Llama-3-8B, all weights, one RTX 4090": ("answer", {"model": "llama-3-8b", "machine": "rtx-4090"}),
    "Llama-3-8B, LoRA, one RTX 4090": ("answer", {"model": "llama-3-8b", "machine": "rtx-4090", "how": "lora"}),
    "Llama-3-8B, QLoRA, one RTX 4090": ("answer", {"model": "llama-3-8b", "machine": "rtx-4090", "how": "qlora"}),
    "Llama-3-8B, all weights, 8 H100": ("answer", {"model": "llama-3-8b", "machine": "h100", "gpus": 8}),
    "Llama-3-70B, all weights, 8 H100": ("answer", {"model": "llama-3-70b", "machine": "h100", "gpus": 8}),
    "Llama-3-70B, QLoRA, one H100": ("answer", {"model": "llama-3-70b", "machine": "h100", "how": "qlora"}),
    "Qwen3-8B, QLoRA, one RTX 3090": ("answer", {"model": "qwen3-8b", "machine": "rtx-3090", "how": "qlora"}),
    "Mistral-7B, LoRA, one A100": ("answer", {"model": "mistral-7b", "machine": "a100-80", "how": "lora"}),
    "Mixtral-8x7B, all weights, 8 H200": ("answer", {"model": "mixtral-8x7b", "machine": "h200", "gpus": 8}),
    "Phi-4, all weights, one H100": ("answer", {"model": "phi-4", "machine": "h100"}),
    "Llama-3-8B, all weights, one RTX 4090 without its host": (
        "answer",
        {"model": "llama-3-8b", "machine": "rtx-4090", "storage": "gpu"},
    ),
    "the cheapest machine for Llama-3-8B, a billion tokens": ("cheapest", {"model": "llama-3-8b", "tokens": 1e9}),
}


def asked(port: int, kind: str, question: dict[str, Any]) -> dict[str, Any]:
    """Ask a question; return seconds until its first answer and its last, and whether there is one."""
    begin_s, first_s, line = time.perf_counter(), None, {}
    connection = http.client.HTTPConnection("localhost", port)
    connection.request("POST", f"/api/{kind}", json.dumps(question), {"content-type": "application/json"})
    for text in connection.getresponse():
        line = json.loads(text)
        if first_s is None and line.keys() & {"first", "result", "error"}:
            first_s = time.perf_counter() - begin_s
    last_s = time.perf_counter() - begin_s
    connection.close()
    assert first_s is not None
    assert "result" in line, line
    return {"first_answer_s": round(first_s, 2), "last_answer_s": round(last_s, 2)}


def main() -> None:
    """Ask everything and write it."""
    began = origin("highspy", "llvmlite", "numba", "numpy", "torch", "transformers", "peft", "bitsandbytes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "ullage", "web", "--port", str(port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            server.stderr.readline()  # it listens
            begin_s, starting = time.perf_counter(), True
            while starting:  # questions that come while it imports everything take longer
                connection = http.client.HTTPConnection("localhost", port)
                body = json.dumps({"model": "opt-125m", "machine": "h100", "seq_len": round(time.time()) % 999 + 1})
                connection.request("POST", "/api/answer", body, {"content-type": "application/json"})
                starting = b"just started" in connection.getresponse().read()
                connection.close()
            start_s = round(time.perf_counter() - begin_s, 1)
            rows = {name: asked(port, *question) for name, question in QUESTIONS.items()}
        finally:
            server.terminate()
    write_result(OUTPUT, {**began, "load_average_after": os.getloadavg()[0], "start_s": start_s, "rows": rows})
    for name, row in rows.items():
        print(f"{row['first_answer_s']:6.2f} s to the first, {row['last_answer_s']:6.2f} s to the last: {name}")


if __name__ == "__main__":
    main()
