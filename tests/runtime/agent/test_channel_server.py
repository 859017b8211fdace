from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from anyio.streams.buffered import BufferedByteReceiveStream
from runtime.clusters import contract, declared, until

from pdctl.engines.channel import (
    MAX_FRAME_BYTES,
    Assignment,
    Attach,
    Effective,
    Failed,
    FromAgent,
    HandoffSettings,
    Members,
    MemberState,
    Message,
    PairState,
    PairStates,
    Poll,
    Ready,
    Refresh,
    Refused,
    Report,
    RouterAssignment,
    encode,
)
from pdctl.handoff.counters import Counters
from pdctl.runtime.agent import channel_server
from pdctl.runtime.agent.channel_server import Assigned, ChannelServer, Link
from pdctl.runtime.agent.view import KEPT_FAILURES, View
from pdctl.topology.model import ComputeDtype, Engine, OnFailure, Role
from pdctl.topology.plan import derive

pytestmark = pytest.mark.anyio

_decoder = msgspec.msgpack.Decoder(FromAgent)


class FakeKeeper:
    """Admits p0 and the router; keeps what it is told."""

    def __init__(self, folder: Path) -> None:
        self.view = View()
        self.links: dict[str, Link] = {}
        self.heard: list[object] = []
        self.peers: list[tuple[int | None, int | None]] = []
        self.plan = derive(declared(folder), contract())

    def admit(self, attach: Attach, uid: int | None, pid: int | None) -> Assigned | str:
        if attach.kind == "router":
            return self.router_assignment()
        self.peers.append((uid, pid))
        return assignment() if attach.name == "p0" else f"no replica {attach.name}"

    def router_assignment(self) -> RouterAssignment:
        return RouterAssignment(
            cluster="studio",
            run="r",
            key=b"k",
            plan=self.plan,
            contract=contract(),
            api_key=None,
            policy="prefix",
            on_failure=OnFailure.ERROR,
            model_dir="",
        )

    def attached(self, name: str, link: Link) -> None:
        self.links[name] = link
        self.heard.append(("attached", name))

    def detached(self, name: str, link: Link) -> None:
        self.heard.append(("detached", name))

    def ready(self, name: str, ready: Ready) -> None:
        self.heard.append(ready)

    def failed(self, failure: Failed) -> None:
        self.heard.append(failure)
        self.view.failed(failure)

    def announced(self, states: PairStates) -> None:
        self.heard.append(states)

    def members(self, seq: int = 0) -> Members:
        return self.view.message(seq)

    async def members_after(self, version: int) -> Members:
        await self.view.changed(version)
        return self.view.message()

    async def refreshed(self, seq: int) -> Members:
        return self.view.message(seq)


def assignment() -> Assignment:
    return Assignment(
        cluster="studio",
        replica="p0",
        role=Role.PREFILL,
        key=b"k" * 32,
        contract=contract(),
        compute_dtype=ComputeDtype.FLOAT32,
        data_host="127.0.0.1",
        data_port=1,
        handoff=HandoffSettings(
            timeout_s=1.0, on_failure=OnFailure.ERROR, buffer_bytes=1, encrypt=False
        ),
    )


def ready() -> Ready:
    return Ready(
        engine=Engine.MLX,
        engine_version="1",
        effective=Effective(
            attention=contract().attention,
            positions=contract().positions,
            compute_dtype=ComputeDtype.FLOAT32,
        ),
        http_port=1,
        data_port=None,
    )


def attach(name: str = "p0", kind: str = "engine") -> Attach:
    return Attach(kind=kind, name=name, pid=os.getpid(), version="0")


class Peer:
    """The other end of one connection."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self._received = BufferedByteReceiveStream(stream)

    async def send(self, message: Message) -> None:
        await self.stream.send(encode(message))

    async def receive(self) -> Any:
        length = int.from_bytes(await self._received.receive_exactly(4), "little")
        return _decoder.decode(await self._received.receive_exactly(length))

    async def ended(self) -> bool:
        try:
            await self._received.receive_exactly(1)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            return True
        return False


Dial = Callable[[], Awaitable[Peer]]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[FakeKeeper, Dial, Path]]:
    path = folder / "agent.sock"
    keeper = FakeKeeper(folder)
    started = anyio.Event()
    peers: list[Peer] = []

    async def dial() -> Peer:
        peers.append(Peer(await anyio.connect_unix(path)))
        return peers[-1]

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ChannelServer(str(path), keeper).run, started.set)
            await started.wait()
            yield keeper, dial, path
            for peer in peers:
                await peer.stream.aclose()
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()


async def test_the_socket_is_for_its_owner_only(tmp_path: Path) -> None:
    """0600, and the kernel's word for who dialled is passed on."""
    async with serving(tmp_path) as (keeper, dial, path):
        assert path.stat().st_mode & 0o777 == 0o600
        peer = await dial()
        await peer.send(attach())
        assert await peer.receive() == assignment()
        assert keeper.peers == [(os.getuid(), os.getpid())]


async def test_an_engine_attaches_is_assigned_and_reports(tmp_path: Path) -> None:
    """Attach → Assignment → Ready, Failed; Poll → Report of the same seq."""
    async with serving(tmp_path) as (keeper, dial, _):
        peer = await dial()
        await peer.send(attach())
        await peer.receive()
        failure = Failed(room=7, leg="prefill", cause="peer_lost", detail="gone")
        await peer.send(ready())
        await peer.send(failure)
        async with anyio.create_task_group() as tasks:
            polled: list[bool] = []

            async def poll() -> None:
                await until("attached", lambda: "p0" in keeper.links)
                polled.append(await keeper.links["p0"].poll())

            tasks.start_soon(poll)
            asked = await peer.receive()
            assert isinstance(asked, Poll)
            await peer.send(Report(seq=asked.seq, counters=Counters(imported_tokens=3)))
        assert polled == [True]
        answer = keeper.links["p0"].answer
        assert isinstance(answer, Report)
        assert answer.counters.imported_tokens == 3
        assert keeper.heard[1:] == [ready(), failure]


async def test_a_replica_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    """Refused says why, then the socket closes."""
    async with serving(tmp_path) as (_, dial, _path):
        peer = await dial()
        await peer.send(attach("x9"))
        assert await peer.receive() == Refused(reason="no replica x9")
        assert await peer.ended()


async def test_a_poll_without_an_answer_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: an engine that does not answer holds nobody up."""
    monkeypatch.setattr(channel_server, "POLL_S", 0.1)
    async with serving(tmp_path) as (keeper, dial, _):
        peer = await dial()
        await peer.send(attach())
        await peer.receive()
        await until("attached", lambda: "p0" in keeper.links)
        assert await keeper.links["p0"].poll() is False


async def test_a_peer_that_says_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: a connection without a whole Attach ends after its time."""
    monkeypatch.setattr(channel_server, "ATTACH_S", 0.1)
    async with serving(tmp_path) as (_, dial, _path):
        peer = await dial()
        await peer.stream.send(b"\x10")
        assert await peer.receive() == Refused(reason="Attach comes first")
        assert await peer.ended()


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x04\x00\x00\x00rubb",
        b"\x00\x00\x00\x00",
        encode(Poll(seq=1)),
        encode(ready()),
    ],
    ids=["too long", "no msgpack", "empty", "of the other direction", "before Attach"],
)
async def test_a_bad_frame_ends_only_its_connection(tmp_path: Path, frame: bytes) -> None:
    """What can't be decoded, or comes out of order, closes that socket; others are served."""
    async with serving(tmp_path) as (_, dial, _path):
        bad, good = await dial(), await dial()
        await bad.stream.send(frame)
        await good.send(attach())
        assert isinstance(await good.receive(), Assignment)
        while not await bad.ended():
            pass


async def test_a_fault_of_the_agents_own_ends_only_its_connection(tmp_path: Path) -> None:
    """R34: an exception while one message is handled does not end the server."""
    async with serving(tmp_path) as (keeper, dial, _):
        keeper.ready = lambda name, ready: 1 / 0  # type: ignore[assignment, misc]
        peer = await dial()
        await peer.send(attach())
        await peer.receive()
        await peer.send(ready())
        assert await peer.ended()
        assert keeper.heard == [("attached", "p0"), ("detached", "p0")]
        again = await dial()
        await again.send(attach())
        assert isinstance(await again.receive(), Assignment)


def member(state: str) -> MemberState:
    return MemberState(name="p0", engine=Engine.MLX, role=Role.PREFILL, host="local", state=state)


async def test_the_router_is_pushed_every_change(tmp_path: Path) -> None:
    """R64: Members at once and at each change; Refresh is answered under its own seq."""
    async with serving(tmp_path) as (keeper, dial, _):
        peer = await dial()
        await peer.send(attach("router", "router"))
        assert isinstance(await peer.receive(), RouterAssignment)
        first = await peer.receive()
        assert (first.members, first.seq) == ((), 0)
        for state in ("starting", "ready", "backoff"):
            keeper.view.update((member(state),), None)
            pushed = await peer.receive()
            assert pushed.members[0].state == state
            assert pushed.version > first.version
        await peer.send(Refresh(seq=41))
        assert (await peer.receive()).seq == 41
        states = PairStates(
            url="http://x",
            pairs=(PairState(prefill="p0", decode="d0", transport="tcp", state="ready"),),
        )
        await peer.send(states)
        await until("announced", lambda: states in keeper.heard)


async def test_counters_alone_make_no_new_version(tmp_path: Path) -> None:
    """A poll that only moves counters pushes nothing and wakes nobody."""
    async with serving(tmp_path) as (keeper, _dial, _path):
        keeper.view.update((member("ready"),), None)
        version = keeper.view.version
        counted = msgspec.structs.replace(member("ready"), counters=Counters(prompt_tokens=9))
        keeper.view.update((counted,), None)
        assert keeper.view.version == version
        assert keeper.view.message().members[0].counters.prompt_tokens == 9


async def test_kept_failures_are_bounded(tmp_path: Path) -> None:
    """The router names causes from the latest failures; older and longer ones are let go."""
    view = View()
    for room in range(KEPT_FAILURES + 10):
        view.failed(Failed(room=room, leg="decode", cause="expired", detail="x" * 10_000))
    kept = view.message().failures
    assert [f.room for f in kept] == list(range(10, KEPT_FAILURES + 10))
    assert max(len(f.detail) for f in kept) <= 500


async def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    """A new agent listens where the killed one left its socket."""
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "agent.sock"))
    stale.close()
    async with serving(tmp_path) as (_, dial, _path):
        peer = await dial()
        await peer.send(attach())
        assert isinstance(await peer.receive(), Assignment)
