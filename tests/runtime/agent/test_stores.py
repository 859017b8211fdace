"""The agent's page store, as a process of its own: started, watched, started again, ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest
from runtime.agent.agents import agent
from runtime.clusters import until, written

from pdctl.engines.channel import REPLICA_ENV, RUN_ENV
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.store.client import StoreClient
from pdctl.handoff.store.interface import StoreSeat
from pdctl.runtime.agent import journal
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.agent.orders import Orders
from pdctl.runtime.agent.stores import StoreState
from pdctl.runtime.cluster.state import ClusterRecord
from pdctl.runtime.cluster.status import from_snapshot

SHARING = '[sharing]\nbuffer_bytes = "64KiB"'
ROLES = {"o0": "both", "o1": "both"}


async def store_in(client: AgentClient, state: str, restarts: int = 0) -> StoreState:
    """The store, once it is in that state."""
    version = 0
    with anyio.fail_after(60):
        while True:
            snapshot = await client.changes(version)
            (found,) = snapshot.stores
            if found.state == state and found.restarts == restarts:
                return found
            version = snapshot.version


def client_of(record: ClusterRecord) -> StoreClient:
    seat = StoreSeat(socket=f"{record.socket_dir}/local.kv")
    return StoreClient(seat, contract=record.contract, board=CounterBoard())


@pytest.mark.anyio
async def test_a_hosts_store_lives_as_long_as_its_agent(tmp_path: Path) -> None:
    """It serves before any replica is started, is started again after kill -9, is found again by
    its clients, and goes with the agent; its replicas are told where it is."""
    async with agent(tmp_path, roles=ROLES, sharing=SHARING) as (state, record, client):
        first = await store_in(client, "ready")
        assert first.name == "store-local"
        replica = client_of(record)
        try:
            assert await anyio.to_thread.run_sync(replica.settled, True, 20.0)
            keys = replica.prompt(range(200)).stored()
            assert replica.publish(keys, lambda place, page: page.fill(place)) == 4
            snapshot = await client.snapshot(fresh=True)
            (shown,) = from_snapshot(record, snapshot).stores
            assert shown["pages"] == 4
            assert 4 * record.contract.page_bytes <= shown["used_bytes"]
            assert shown["used_bytes"] <= shown["budget_bytes"] <= 64 << 10
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            again = await store_in(client, "ready", restarts=1)
            assert again.pid != first.pid
            assert await anyio.to_thread.run_sync(replica.settled, True, 20.0)
            await until("a miss", lambda: replica.held(keys) == 0)
        finally:
            replica.close()
        entry = journal.read(state.journal("local")).entry("store-local")
        assert entry is not None
        assert entry.wanted


def test_replicas_are_told_of_their_hosts_store(tmp_path: Path) -> None:
    """Of every role; the store runs in the agent's own environment, with the same ties as every
    process; its assignment has the budget, and no port where no other host has one."""
    roles = {"p0": "prefill", "d0": "decode", **ROLES}
    with written(tmp_path, roles=roles, sharing=SHARING) as (state, record):
        orders = Orders(record, state, "local", environ={})
        seats = {r.name: orders.assignment(r).store for r in record.plan.replicas}
        seat = seats["o0"]
        assert seat is not None
        assert set(seats) == {"p0", "d0", "o0", "o1"}
        assert all(each == seat for each in seats.values())
        assert seat.socket == f"{record.socket_dir}/local.kv"
        assert orders.store is not None
        assigned = orders.store_assignment(orders.store)
        assert (assigned.seat, assigned.buffer_bytes) == (seat, 64 << 10)
        assert (assigned.data_port, assigned.others) == (None, {})
        order = orders.maker("store-local")()
        assert order.command.argv == (sys.executable, "-m", "pdctl.runtime.store")
        assert order.command.env[REPLICA_ENV] == "store-local"
        assert order.command.env[RUN_ENV] == record.run


def test_without_sharing_nobody_has_a_store(tmp_path: Path) -> None:
    with written(tmp_path, roles=ROLES) as (state, record):
        orders = Orders(record, state, "local", environ={})
        assert orders.store is None
        assert orders.assignment(record.plan.replica("o0")).store is None
