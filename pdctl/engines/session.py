"""A replica's place in its cluster, held by the process that owns the KV memory, where the
engine's HTTP server is another process.

It attaches to the agent, opens the sender or the receiver, and reports Ready once that server
answers.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any

import msgspec

from pdctl.engines.attachment import ATTACH_TIMEOUT_S, Attachment
from pdctl.engines.channel import Assignment, Failed, Ready
from pdctl.engines.ends import Ends, close_each, open_ends, open_ends_apart, open_store
from pdctl.engines.readiness import effective_of, terms_of
from pdctl.errors import HandoffError, LaunchError
from pdctl.handoff.apart.choice import is_apart
from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard, Counters
from pdctl.handoff.device import DeviceMaker, MemoryKind
from pdctl.handoff.seam import ReceivingEnd, SendingEnd
from pdctl.handoff.store.client import StoreClient
from pdctl.topology.contract import Attention
from pdctl.topology.model import ComputeDtype, Engine, Transport

log = logging.getLogger("pdctl.engines")

SWITCH_INTERVAL_S = 0.0005
"""After which a thread that computes lets another one have the interpreter: Python's own 5 ms are
more than a whole handoff of a short prompt takes (bench/busy_interpreter.py)."""
DEVICE_ENV = "PDCTL_DEVICE"
"""Of a replica's environment: "host" has an engine on a CPU treat the host's memory as a device's.
For tests."""
HTTP_POLL_S = 0.1
HTTP_TIMEOUT_S = 5.0


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has really loaded, as far as it tells."""

    engine_version: str
    attention: Attention
    positions: dict[str, Any]
    compute_dtype: ComputeDtype
    block_tokens: int


class Session:
    """`attach` first, then `open`; `close` last, in any state.

    Args:
        http_port: of the engine's HTTP server, on loopback.
        served_path: answered there with 200 once it serves.
        counters: what Polls are answered with; None: the board as it stands.

    Raises:
        UsageError: the process was not started by an agent.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        http_port: int,
        *,
        engine: Engine,
        served_path: str,
        counters: Callable[[], Counters] | None = None,
    ) -> None:
        self.board = CounterBoard()
        self._ends = Ends()
        self.store: StoreClient | None = None
        """Of its host's page store; None before `open`, and where this replica shares none."""
        self._environment = environment
        self._http_port = http_port
        self._engine = engine
        self._served_path = served_path
        self._attachment = Attachment.from_environment(
            environment, counters=counters or self.board.read, superseded=_superseded
        )
        self._assigned: Assignment | None = None
        self._closed = threading.Event()

    @property
    def sender(self) -> SendingEnd | None:
        return self._ends.sender

    @property
    def receiver(self) -> ReceivingEnd | None:
        return self._ends.receiver

    @property
    def assigned(self) -> Assignment:
        assert self._assigned is not None, "attach() comes first"
        return self._assigned

    @property
    def replica(self) -> str:
        return self.assigned.replica

    def attach(self) -> Assignment:
        """Raises LaunchError when the agent refuses, or does not answer in time."""
        self._assigned = self._attachment.open(ATTACH_TIMEOUT_S)
        return self._assigned

    def open(
        self,
        loaded: Loaded,
        memory: Callable[[int], Bytes] | None = None,
        lock: Callable[[Bytes], None] | None = None,
        device: DeviceMaker | None = None,
    ) -> None:
        """Opens this role's end; Ready follows by itself. Where pages lie in a device's memory,
        that is in this process: no byte of theirs needs the interpreter, and their memory is its.

        Args:
            memory: as `open_ends` takes it, and `device`; `lock` as `open_ends_apart` does.

        Raises:
            PeerLost: the data port can't be listened on, or the data plane did not start.
            HandoffError: pages are to be read through NIXL, which does not work here.
            LaunchError: they are to lie in a device's memory, and the engine's KV lies elsewhere.
            MemoryError: no memory can be locked, or the device has not enough.
        """
        assigned, environment = self.assigned, self._environment
        if assigned.device_pages:
            checked_device(device, environment)
            self._ends = open_ends(assigned, self.board, self.report, environment, memory, device)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        elif is_apart(environment):
            self._ends = open_ends_apart(assigned, self.board, self.report, lock, _leave)
            if self._ends != Ends():
                sys.setswitchinterval(SWITCH_INTERVAL_S)
        else:
            self._ends = open_ends(assigned, self.board, self.report, environment, memory)
        self.store = open_store(self.assigned, self.board, lock)
        if self.store is not None:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        ready = self._ready(loaded, self._ends.listen())
        threading.Thread(
            target=self._announce, args=(ready,), name="pdctl-announce", daemon=True
        ).start()

    def report(self, failed: Failed) -> None:
        self._attachment.failed(failed)

    def close(self) -> None:
        """Bounded; a failing step skips none of the next."""
        self._closed.set()
        steps = [self._ends.close, self._attachment.close]
        close_each(steps if self.store is None else [self.store.close, *steps])

    def _ready(self, loaded: Loaded, data_port: int | None) -> Ready:
        contract = self.assigned.contract
        return Ready(
            engine=self._engine,
            engine_version=loaded.engine_version,
            effective=effective_of(
                contract, loaded.attention, loaded.positions, loaded.compute_dtype
            ),
            http_port=self._http_port,
            data_port=data_port,
            terms=terms_of(
                contract,
                native=self.assigned.native,
                nixl=Transport.NIXL in self.assigned.transports.values(),
                block_tokens=loaded.block_tokens,
            ),
        )

    def _announce(self, ready: Ready) -> None:
        while not self._closed.is_set():
            if self._serves():
                self._attachment.ready(ready)
                log.info("replica=%s ready, role=%s", self.replica, self.assigned.role.value)
                return
            self._closed.wait(HTTP_POLL_S)

    def _serves(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._http_port, timeout=HTTP_TIMEOUT_S)
        try:
            connection.request("GET", self._served_path)
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


def checked_device(device: DeviceMaker | None, environment: Mapping[str, str]) -> None:
    """Raises LaunchError where the engine's KV does not lie on the device that the plan names."""
    on_gpu = device is not None and device.kind is MemoryKind.DEVICE
    if not on_gpu and (device is None or environment.get(DEVICE_ENV) != "host"):
        raise LaunchError(
            "the topology names a device for this replica, and its engine keeps KV in host memory",
            hint="leave `devices` away on the replica, or give it an engine that has a GPU",
        )


def _superseded() -> None:
    log.error("the agent assigns something else now; ending")
    os._exit(1)


def _leave(error: HandoffError) -> None:
    """The agent has been told of every handoff, and starts the replica again."""
    log.error("ending: %s", error)
    os._exit(1)
