"""A cluster that is broken, a request that meets the fault, and the table of what became of all."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from typing import Any

import httpx2 as httpx
from e2e.cluster import Cluster

ANSWER_S = 5.0
"""From a fault to the client's answer."""
SILENCE_S = 7.5
"""The same where only silence tells: dead after 5 s of it, looked at each quarter second."""


class Request:
    """One streamed completion in a thread of its own: its answer, and when it ended."""

    def __init__(
        self,
        cluster: Cluster,
        prompt: str,
        *,
        path: str | None = "p0>d0",
        max_tokens: int = 4,
        **more: Any,
    ) -> None:
        self.status: int | None = None
        """None: the connection broke before one."""
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.complete = False
        """It ended with [DONE]."""
        self.path = ""
        self.begun = threading.Event()
        """At the first event."""
        self.began_s = time.monotonic()
        self.ended_s = 0.0
        self._response: httpx.Response | None = None
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
        headers = {} if path is None else {"x-pdctl-path": path}
        arguments = (cluster.url, {**body, **more, "stream": True}, headers)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def _run(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            try:
                with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                    self.status = answer.status_code
                    self.path = answer.headers.get("x-pdctl-path", "")
                    if answer.status_code != 200:
                        self.error = json.loads(answer.read())["error"]
                    else:
                        self._read(answer)
            except httpx.HTTPError as error:
                self.error = {"message": f"connection broken: {type(error).__name__}", "code": None}
        self.ended_s = time.monotonic()

    def _read(self, answer: httpx.Response) -> None:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                self.complete = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]
                else:
                    self.text += event["choices"][0].get("text") or ""
                    self.begun.set()

    def result(self, within_s: float = 60) -> Request:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the request hangs"
        return self

    def good(self, expected: str | None = None) -> Request:
        self.result()
        assert self.complete, (self.status, self.error)
        assert self.error is None
        if expected is not None:
            assert self.text.strip() == expected.strip()
        return self

    def told(self, *words: str, since_s: float | None = None, within_s: float = ANSWER_S) -> float:
        """It ended with an error that says all of `words`, in time. Returns the seconds from
        the fault (None: from the request's start)."""
        self.result()
        took_s = self.ended_s - (self.began_s if since_s is None else since_s)
        assert self.error is not None, self.answer
        assert not self.complete
        assert [word for word in words if word not in self.error["message"]] == [], self.answer
        assert took_s < within_s, self.answer
        return took_s

    @property
    def answer(self) -> str:
        """In one line."""
        if self.error is None:
            return f"{self.status}, whole"
        code = self.error.get("code")
        began = "error event: " if self.status == 200 else f"{self.status} " if self.status else ""
        return f"{began}{code + ': ' if code else ''}{self.error['message']}"


class Mending(Cluster):
    """What tests break, and that is whole again after each; a subclass says what it runs."""

    at_rest: Counter[str]
    """The census of the whole cluster."""

    def census(self) -> Counter[str]:
        """How many processes of each kind there are."""
        raise NotImplementedError

    def mend(self) -> None:
        """Undoes what a test does to it from outside."""
        raise NotImplementedError

    def settle(self, within_s: float = 60) -> None:
        """Whole again, every pair."""
        self.mend()
        self.wait("every pair ready", self.ready, within_s)

    def recovered(self, prompt: str, expected: str, path: str = "p0>d0") -> int:
        """Every pair is ready again, the next request right; returns what is left (`left`)."""
        self.settle()
        Request(self, prompt, path=path, max_tokens=8).good(expected)
        return self.left()

    def left(self, within_s: float = 10.0) -> int:
        """What is in flight, and processes more than at rest, once that is 0 or time is up."""
        until_s = time.monotonic() + within_s
        while True:
            more = sum((self.census() - self.at_rest).values())
            left = more + self.in_flight()
            if left == 0 or time.monotonic() > until_s:
                return left
            time.sleep(0.1)


class Ledger:
    """One row per fault: what the client was told, when, and what was left."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []

    def row(self, fault: str, answer: str, seconds: float | None, left: int) -> None:
        took = "" if seconds is None else f"{seconds:.2f}"
        self.rows.append((fault, answer.replace("|", "/"), took, str(left)))
        print(f"\n| {' | '.join(self.rows[-1])} |")  # noqa: T201

    def __str__(self) -> str:
        head = (("fault", "answer", "s", "left"), ("---", "---", "---:", "---:"))
        return "\n".join(f"| {' | '.join(row)} |" for row in (*head, *self.rows))
