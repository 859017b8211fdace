"""`make demo`: the main job from end to end, with a real model, on this machine.

Runs the same commands that you would type, in order, and stops everything at the end. Exit
status 0 means that every step worked and that nothing is left running.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PDCTL = Path(sys.executable).with_name("pdctl")
EXAMPLE = HERE / "topologies" / "mlx-demo.toml"
DEFAULT_BIND = "127.0.0.1:8000"
QUESTION = "What is the capital of France?"
MAX_TOKENS = 24
TIMEOUT_S = 300.0
PAGE_TOKENS = 64


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="pdctl-demo-") as folder:
        bind = DEFAULT_BIND if is_free(8000) else f"127.0.0.1:{free_port()}"
        topology = Path(folder) / EXAMPLE.name
        topology.write_text(EXAMPLE.read_text().replace(DEFAULT_BIND, bind))
        refuse_running()
        run("demo-model")
        run("validate", topology)
        run("up", topology, "--detach")
        try:
            before = pair(topology)
            prompt_tokens = ask(f"http://{bind}")
            run("ps", topology)
            check_counters(before, pair(topology), prompt_tokens, page_bytes(topology))
        finally:
            run("down", topology)
    print("\ndemo: everything worked, and everything was stopped")
    return 0


def refuse_running() -> None:
    """The demo ends with a `down`, which must not be of somebody's own cluster."""
    if subprocess.run([PDCTL, "ps", "demo"], capture_output=True, check=False).returncode == 0:
        raise SystemExit('demo: a cluster "demo" runs already; `pdctl down demo` stops it')


def run(*arguments: object) -> None:
    """Runs one pdctl command as a user would see it; ends the demo when it fails."""
    words = [str(a) for a in arguments]
    print(f"\n$ pdctl {' '.join(words)}", flush=True)
    with subprocess.Popen([PDCTL, *words]) as command:
        try:
            code = command.wait()
        except KeyboardInterrupt:
            command.wait()  # Ctrl-C reached it too, and it is rolling back
            raise
    if code:
        raise SystemExit(f"demo: `pdctl {words[0]}` ended with {code}")


def ask(url: str) -> int:
    """Streams one chat answer to the terminal; returns the prompt's tokens from its usage."""
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    print(f"\n$ curl {url}/v1/chat/completions  # stream, {QUESTION!r}\n", flush=True)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        path = answer.headers["x-pdctl-path"]
        prompt_tokens = 0
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"demo: {event['error']['message']}")
                for choice in event["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
                prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    print(f"\n\n({prompt_tokens} prompt tokens; path {path})")
    return prompt_tokens


def check_counters(
    before: dict[str, int], after: dict[str, int], prompt_tokens: int, page_bytes: int
) -> None:
    """The handoff moved exactly the prompt less its last token, in exactly its pages' bytes."""
    moved = {
        k: after[k] - before[k] for k in ("handoffs_completed", "imported_tokens", "host_bytes")
    }
    pages = -(-(prompt_tokens - 1) // PAGE_TOKENS)
    print(
        f"\nthis answer: {moved['handoffs_completed']} handoff, "
        f"{moved['imported_tokens']} tokens imported (prompt - 1), "
        f"{moved['host_bytes']} host bytes ({pages} page of {page_bytes})"
    )
    wanted = {
        "handoffs_completed": 1,
        "imported_tokens": prompt_tokens - 1,
        "host_bytes": pages * page_bytes,
    }
    if moved != wanted or after["handoffs_active"] or after["handoffs_failed"]:
        raise SystemExit(f"demo: the counters should say {wanted}")


def pair(topology: Path) -> dict[str, int]:
    """The counters of the topology's one pair."""
    return dict(read("ps", topology)["pairs"][0])


def page_bytes(topology: Path) -> int:
    return int(read("plan", topology)["plan"]["page_bytes"])


def read(verb: str, topology: Path) -> dict[str, Any]:
    """What a reading command prints with --json."""
    done = subprocess.run(
        [PDCTL, verb, topology, "--json"], check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return dict(json.loads(done.stdout))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
