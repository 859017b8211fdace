"""The router as a process: how it starts, is told, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import msgspec
import pytest
from runtime.router.cluster import CHAT, contract, plan_of
from runtime.router.fakes import FakeEngine, StubKeeper, chunk_of, streams

from pdctl.engines.channel import SOCKET_ENV, RouterAssignment
from pdctl.topology.model import OnFailure

pytestmark = pytest.mark.anyio

ARGV = (sys.executable, "-m", "pdctl.runtime.router")
WITHIN_S = 30.0
KEY = b"k" * 32


async def started(socket_path: str | None) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if name != SOCKET_ENV}
    if socket_path is not None:
        environment[SOCKET_ENV] = socket_path
    return await asyncio.create_subprocess_exec(
        *ARGV, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    with anyio.fail_after(WITHIN_S):
        _, said = await process.communicate()
    return process.returncode, said.decode()


@contextlib.asynccontextmanager
async def keeper_of(folder: Path, bind: str) -> AsyncIterator[StubKeeper]:
    plan = msgspec.structs.replace(plan_of("o0"), router_bind=bind)
    assignment = RouterAssignment(
        cluster="test",
        run="run1",
        key=KEY,
        plan=plan,
        contract=contract(),
        api_key=None,
        policy="least_loaded",
        on_failure=OnFailure.ERROR,
        model_dir="",
    )
    keeper = StubKeeper(str(folder / "s"), assignment)
    engine = keeper.engines["o0"] = FakeEngine("o0", plan.replicas[0].role)
    await engine.start()
    await keeper.start()
    try:
        yield keeper
    finally:
        await keeper.stop()
        await engine.kill()


async def test_without_a_socket_it_is_a_usage_error() -> None:
    code, said = await ended(await started(None))
    assert code == 2
    assert SOCKET_ENV in said


async def test_without_an_agent_it_fails_with_a_sentence(tmp_path: Path) -> None:
    code, said = await ended(await started(str(tmp_path / "s")))
    assert code == 5
    assert "the agent's socket cannot be opened" in said
    assert "Traceback" not in said


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with keeper_of(tmp_path, f"127.0.0.1:{port}") as keeper:
            code, said = await ended(await started(keeper.path))
    assert code == 5
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "Traceback" not in said


async def test_sigterm_ends_it_within_its_bound_even_with_a_stream_running(tmp_path: Path) -> None:
    """U26: exit 0, the engine's leg is closed, nothing listens any more."""
    async with keeper_of(tmp_path, "127.0.0.1:0") as keeper:
        process = await started(keeper.path)
        with anyio.fail_after(WITHIN_S):
            while keeper.last_states is None or keeper.last_states.replicas[0].state != "ready":
                keeper.changed.clear()
                await keeper.changed.wait()
        engine = keeper.engines["o0"]
        engine.on["alone"] = streams(chunk_of(CHAT, "a"), hang=True)
        url = keeper.last_states.url
        async with aiohttp.ClientSession() as http:
            response = await http.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": True})
            await response.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            code, said = await ended(process)
            response.close()
            with pytest.raises(aiohttp.ClientConnectorError):
                await http.get(f"{url}/health")
        assert code == 0, said
        assert "Traceback" not in said
        with anyio.fail_after(WITHIN_S):
            while engine.open:  # noqa: ASYNC110
                await anyio.sleep(0.002)


def shown_to_others(pid: int) -> bytes:
    folder = Path(f"/proc/{pid}")
    names = ("environ", "cmdline")
    return b"".join((folder / n).read_bytes() for n in names if (folder / n).exists())


async def test_nothing_secret_is_on_its_command_line(tmp_path: Path) -> None:
    """The key and the API key come over the 0600 socket."""
    assert KEY.decode() not in " ".join(ARGV)
    async with keeper_of(tmp_path, "127.0.0.1:0") as keeper:
        process = await started(keeper.path)
        with anyio.fail_after(WITHIN_S):
            await keeper.changed.wait()
        assert KEY not in shown_to_others(process.pid)
        process.terminate()
        assert (await ended(process))[0] == 0
