"""Sends fuzzed requests to a router, and says what came of each.

The router is a process of its own, over engine doubles in this one; or, with --url, any that
runs. Whatever it is sent it answers or hangs up: no 5xx, no traceback, no hang, and its
memory stays.

    python tests/fuzz/http_bodies.py [--count 100000] [--seed 0] [--output FILE] [--url URL]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz.requests import Fuzzed, fuzzed
from runtime.router.cluster import MODEL, contract, plan_of
from runtime.router.fakes import FakeEngine, StubKeeper

from pdctl.engines.channel import SOCKET_ENV, RouterAssignment
from pdctl.topology.model import OnFailure

ANSWER_S = 20.0
"""A request without an answer for that long counts as hung."""
UNFRAMED_S = 0.05
"""How long a request whose end can't be known is left open before its client hangs up."""
WORKERS = 8
WARM_UP = 0.2
"""Of the requests: what memory is compared with."""
NOTED = 20


class Target(msgspec.Struct):
    """A router that listens, and its process where that is known."""

    host: str
    port: int
    model: str
    process: psutil.Process | None = None
    log: Path | None = None

    def resident_bytes(self) -> int | None:
        return self.process.memory_info().rss if self.process is not None else None

    def descriptors(self) -> int | None:
        return self.process.num_fds() if self.process is not None else None


class Findings(msgspec.Struct):
    """What came of the requests; `wrong` is what must be empty."""

    sent: Counter[str] = msgspec.field(default_factory=Counter)
    statuses: Counter[str] = msgspec.field(default_factory=Counter)
    wrong: list[str] = msgspec.field(default_factory=list)
    resident_bytes: list[int] = msgspec.field(default_factory=list)
    descriptors: list[int] = msgspec.field(default_factory=list)

    def note(self, request: Fuzzed, what: str) -> None:
        if len(self.wrong) < NOTED:
            self.wrong.append(f"{what}: {request.kind}: {request.raw[:600]!r}")


class BadAnswer(ConnectionError):
    """An answer that a client can't read."""


class Line:
    """One worker's connection."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: Fuzzed) -> int | None:
        """The status; None where the router hung up instead, which it may where the request
        is not properly framed. Raises ConnectionError where it hung up and should not have."""
        if not request.framed:
            self.close()
        fresh = self._streams is None
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._target.host, self._target.port)
        reader, writer = self._streams
        try:
            writer.write(request.raw)
            if request.framed:
                return await self._answer(reader)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNFRAMED_S):
                    return _status(await reader.readline())
            # it waits for more, of which nothing comes: then it must hang up
            writer.write_eof()
            return _status(await reader.readline())
        except BadAnswer:
            raise
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if not request.framed:
                return None
            if fresh:
                raise ConnectionError("hung up without an answer") from None
            return await self.ask(request)
        finally:
            if not request.framed:
                self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _answer(self, reader: asyncio.StreamReader) -> int:
        status = _status(await reader.readline())
        if status is None:
            raise ConnectionError("no status")
        headers = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, text = line.partition(b":")
            headers[name.lower()] = text.strip()
        body = b""
        if headers.get(b"transfer-encoding") == b"chunked":
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        else:
            body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        if headers.get(b"connection", b"").lower() == b"close":
            self.close()
        if status >= 400:
            _check_error(body)
        return status


def _check_error(body: bytes) -> None:
    """Raises BadAnswer where a client could not read the error as OpenAI's."""
    try:
        error = json.loads(body)["error"]
        told = set(error) == {"message", "type", "param", "code"} and error["message"]
    except (ValueError, KeyError, TypeError):
        told = False
    if not told:
        raise BadAnswer(f"no error object but {body[:200]!r}")


def _status(line: bytes) -> int | None:
    parts = line.split(b" ")
    return int(parts[1]) if line.startswith(b"HTTP/1.") and len(parts) > 1 else None


async def fuzz(target: Target, count: int, seed: int) -> Findings:
    """Sends `count` requests over a few connections; stops early where the router died."""
    draw, found, left = random.Random(seed), Findings(), iter(range(count))
    look_every = max(1, count // 100)

    async def work() -> None:
        line = Line(target)
        for number in left:
            request = fuzzed(draw, target.model)
            found.sent[request.kind] += 1
            try:
                status = await asyncio.wait_for(line.ask(request), ANSWER_S)
            except TimeoutError:
                found.note(request, f"no answer within {ANSWER_S:g} s")
                line.close()
                continue
            except OSError as error:
                found.note(request, str(error))
                if len(found.wrong) == NOTED:
                    return
                continue
            found.statuses[str(status)] += 1
            if status is not None and status >= 500:
                found.note(request, str(status))
            if number % look_every == 0:
                _look(target, found)
        line.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(WORKERS):
            tasks.create_task(work())
    if target.log is not None and b"Traceback" in (said := target.log.read_bytes()):
        found.wrong.append(f"a traceback: {said[said.index(b'Traceback') :][:3000].decode()}")
    return found


def _look(target: Target, found: Findings) -> None:
    resident, descriptors = target.resident_bytes(), target.descriptors()
    if resident is not None and descriptors is not None:
        found.resident_bytes.append(resident)
        found.descriptors.append(descriptors)


@contextlib.asynccontextmanager
async def router() -> AsyncIterator[Target]:
    """A router's process over p0, d0 and o0, ready; ended, and asked for its exit, after."""
    with tempfile.TemporaryDirectory() as name:
        folder, plan = Path(name), plan_of("p0 d0 o0")
        assignment = RouterAssignment(
            cluster="test",
            run="run1",
            key=bytes(32),
            plan=plan,
            contract=contract(),
            api_key=None,
            policy="round_robin",
            on_failure=OnFailure.ERROR,
            model_dir="",
        )
        keeper = StubKeeper(str(folder / "s"), assignment)
        for replica in plan.replicas:
            engine = keeper.engines[replica.name] = Forgetful(replica.name, replica.role)
            await engine.start()
        await keeper.start()
        log = folder / "log"
        with log.open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdctl.runtime.router"),
                env={**os.environ, SOCKET_ENV: keeper.path},
                stderr=said,
            )
        try:
            async with asyncio.timeout(ANSWER_S):
                while not _ready(keeper):
                    keeper.changed.clear()
                    await keeper.changed.wait()
            assert keeper.last_states is not None
            url = urlsplit(keeper.last_states.url)
            assert url.hostname is not None
            assert url.port is not None
            yield Target(url.hostname, url.port, MODEL, psutil.Process(process.pid), log)
            assert process.returncode is None, "the router ended by itself"
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            await keeper.stop()
            for engine in keeper.engines.values():
                await engine.kill()


class Forgetful(FakeEngine):
    """A double that keeps no bodies: hundreds of thousands pass through it."""

    async def _generate(self, request):  # type: ignore[no-untyped-def]
        self.bodies.clear()
        return await super()._generate(request)


def _ready(keeper: StubKeeper) -> bool:
    states = keeper.last_states
    shown = () if states is None else (*states.pairs, *states.replicas)
    return bool(shown) and all(state.state == "ready" for state in shown)


def flat(values: list[int], slack: float, spare: int) -> bool:
    """Whether the last tenth's median is no more than the one after the warm-up allows."""
    if len(values) < 20:
        return True
    warm = sorted(values[int(len(values) * WARM_UP) :][: len(values) // 10])
    last = sorted(values[-len(values) // 10 :])
    return last[len(last) // 2] <= warm[len(warm) // 2] * slack + spare


async def run(count: int, seed: int, url: str | None) -> dict[str, object]:
    begun = time.monotonic()
    if url is None:
        async with router() as target:
            found = await fuzz(target, count, seed)
    else:
        parts = urlsplit(url)
        found = await fuzz(Target(parts.hostname or "", parts.port or 80, MODEL), count, seed)
    if not flat(found.resident_bytes, 1.1, 8 << 20):
        found.wrong.append("resident memory grew")
    if not flat(found.descriptors, 1.0, 4):
        found.wrong.append("descriptors grew")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "method": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "load_1m": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pdctl", "aiohttp", "msgspec")},
        },
        "count": count,
        "seed": seed,
        "connections": WORKERS,
        "seconds": round(time.monotonic() - begun, 1),
        "sent": dict(found.sent),
        "statuses": dict(sorted(found.statuses.items())),
        "resident_mib": [round(n / 2**20, 1) for n in found.resident_bytes[::5]],
        "descriptors": found.descriptors[::5],
        "wrong": found.wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="a router that runs, for example http://127.0.0.1:8000")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    asked = parser.parse_args()
    result = asyncio.run(run(asked.count, asked.seed, asked.url))
    text = json.dumps(result, indent=2, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    if asked.output is not None:
        asked.output.write_text(text + "\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
