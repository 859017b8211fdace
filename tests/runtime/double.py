"""A test double of an engine: speaks the channel, answers HTTP, and misbehaves when told to.

`DOUBLE` in its environment names the fault: "exit" at start, "exit if PATH"
(exists), "never_ready", "wrong_theta",
"stubborn" (ignores SIGTERM), "forks" (a child in the same session, one in its own). A prompt
"hold PATH" is answered once nothing exists at PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from pdctl.engines.attachment import Attachment
from pdctl.engines.channel import Assignment, Effective, Ready
from pdctl.handoff.counters import Counters
from pdctl.topology.model import Engine, Role

TOKEN = {"id": 7, "token": " a", "logprob": -0.1, "bytes": None}
STEP = {**TOKEN, "top_logprobs": [{"id": 7 + i, "logprob": -0.1 - i} for i in range(5)]}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def hold(prompt: object) -> None:
    if isinstance(prompt, str) and prompt.startswith("hold "):
        while os.path.exists(prompt.removeprefix("hold ")):
            time.sleep(0.02)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body.get("max_tokens", 1)
        hold(body.get("prompt"))
        choice = {"index": 0, "finish_reason": "length", "logprobs": {"content": [STEP] * count}}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": " a" * count}
        else:
            choice["text"] = " a" * count
        usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count}
        whole = {"id": "x", "model": "x", "choices": [choice], "usage": usage}
        if body.get("stream"):
            choice["delta"] = choice.pop("message", None)
            event = b"data: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n"
            self.send(event, "text/event-stream")
        else:
            self.answer(whole)

    def answer(self, content: object) -> None:
        self.send(json.dumps(content).encode(), "application/json")

    def send(self, raw: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, form: str, *arguments: object) -> None:
        say(form % arguments)


def ready_message(assigned: Assignment, port: int, fault: str) -> Ready:
    positions = assigned.contract.positions
    if fault == "wrong_theta":
        positions = msgspec.structs.replace(positions, rope_theta=positions.rope_theta + 1)
    return Ready(
        engine=Engine.MLX,
        engine_version="double",
        effective=Effective(
            attention=assigned.contract.attention,
            positions=positions,
            compute_dtype=assigned.compute_dtype,
        ),
        http_port=port,
        data_port=assigned.data_port if assigned.role is Role.PREFILL else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_known_args()[0].port
    fault = os.environ.get("DOUBLE", "")
    say(f"double: {fault or 'well'}")
    if fault == "exit" or (fault.startswith("exit if ") and os.path.exists(fault[8:])):
        say("double: cannot find the weights")
        return 3
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "forks":
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    attachment = Attachment.from_environment(
        os.environ, counters=lambda: Counters(prompt_tokens=5), superseded=lambda: os._exit(4)
    )
    assigned = attachment.open(60.0)
    if fault != "never_ready":
        attachment.ready(ready_message(assigned, port, fault))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
