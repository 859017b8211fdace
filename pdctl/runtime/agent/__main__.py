"""`python -m pdctl.runtime.agent --state DIR --host NAME`: one host's agent, until told to end.

The actor system's key goes from the state directory into this process's own environment, after
start: it is on no command line, and not in what other processes can read of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.abc

from pdctl.errors import PdctlError
from pdctl.runtime.agent.core import Agent
from pdctl.runtime.agent.orders import Orders
from pdctl.runtime.agent.outpost import FarHost, forwards_to
from pdctl.runtime.agent.watchdog import SERVING_FD_ENV
from pdctl.runtime.cluster.state import ClusterRecord, StateDir, actor_key
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.machine.process import ACTOR_KEY_ENV

log = logging.getLogger("pdctl.agent")

REPLY_S = 0.2
"""For the answer to the last call to reach its caller."""


def main() -> int:
    """Exit code: 0 after shutdown or SIGTERM, the error's own otherwise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("xoscar").setLevel(logging.WARNING)
    arguments = _arguments()
    try:
        state = StateDir(Path(arguments.state))
        record = state.read()
        if record is None:
            raise PdctlError(f"{state.path}: no cluster was launched from here")
        orders = Orders(record, state, arguments.host)
        os.environ[ACTOR_KEY_ENV] = actor_key(state.read_key())
        for folder in (os.path.dirname(record.socket_dir), record.socket_dir):
            LocalHost().make_dir(folder)
        with _far_hosts(record, arguments.host) as hosts:
            anyio.run(_serve, orders, record, hosts)
    except PdctlError as error:
        log.error("%s", error.message)
        return error.exit_code
    except OSError as error:
        log.error("%s", error)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pdctl.runtime.agent")
    parser.add_argument("--state", required=True, help="the cluster's state directory")
    parser.add_argument("--host", required=True, help="this host's name in the topology")
    return parser.parse_args()


@contextlib.contextmanager
def _far_hosts(record: ClusterRecord, own: str) -> Iterator[dict[str, FarHost]]:
    """On the keeper, the way to every other host, with the forwards to its engines."""
    plan = record.plan
    names = [name for name in plan.agent_ports if name != own]
    if own != plan.router_host or not names:
        yield {}
        return
    from pdctl.runtime.hosts.reach import Hosts

    forwards = {name: forwards_to(name, plan) for name in names}
    with Hosts(record.topology.hosts, forwards=forwards) as hosts:
        yield {name: hosts.far(name) for name in names}


async def _serve(orders: Orders, record: ClusterRecord, far: dict[str, FarHost]) -> None:
    from pdctl.runtime.agent.actor import UID, AgentActor
    from pdctl.runtime.agent.oscar import xoscar

    agent = Agent(orders, far=far)
    address = f"127.0.0.1:{record.plan.agent_ports[orders.host]}"
    listening = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_obey_signals, agent.stopping)
        tasks.start_soon(_run, agent, listening, tasks)
        await listening.wait()
        pool = await xoscar.create_actor_pool(
            address, n_process=0, enable_internal_addresses=[False]
        )
        try:
            await xoscar.create_actor(AgentActor, agent, address=pool.external_address, uid=UID)
            log.info("host=%s serving at %s", orders.host, address)
            _tell_serving()
            await agent.stopping.wait()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5.0):
                await anyio.sleep(REPLY_S)
                await pool.stop()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(orders.socket_path)


def _tell_serving() -> None:
    """To the watchdog, where there is one."""
    descriptor = os.environ.pop(SERVING_FD_ENV, None)
    if descriptor is not None:
        os.write(int(descriptor), b"1")
        os.close(int(descriptor))


async def _run(agent: Agent, listening: anyio.Event, tasks: anyio.abc.TaskGroup) -> None:
    await agent.run(listening.set)
    tasks.cancel_scope.cancel()


async def _obey_signals(stopping: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for number in signals:
            log.info("%s: stopping everything", signal.Signals(number).name)
            stopping.set()


if __name__ == "__main__":
    sys.exit(main())
