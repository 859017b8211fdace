"""A cluster that is changed while it runs, from one agent's end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdctl.errors import ClusterError
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.lifecycle import SETTLED
from pdctl.runtime.cluster.state import ClusterRecord

if TYPE_CHECKING:
    from pdctl.runtime.agent.core import Agent

log = logging.getLogger("pdctl.agent")


async def change(agent: Agent, record: ClusterRecord) -> None:
    """Writes the changed record down, drops what has gone, makes room for what comes, and
    tells the other hosts' agents and the router. Nothing is started or stopped; a replica that
    is started from now on is started as the record says. Doing it twice changes nothing.

    Raises:
        ClusterError: of another run, or a replica that goes still runs; nothing has changed.
        HostError: the record can't be written, or the way to an engine can't be made; likewise.
        AgentLost: another host can't be told; it is told by doing it again.
    """
    if record.run != agent.run_id:
        raise ClusterError("that is the record of another run")
    here = {replica.name for replica in record.plan.replicas if replica.host == agent.host}
    going = agent.supervised.keys() - here - {ROUTER} - set(agent.store_names)
    for name in sorted(going):
        if agent.supervised[name].state not in SETTLED:
            raise ClusterError(f"{name} is {agent.supervised[name].state}, not stopped")
    for outpost in agent.outposts:
        await outpost.lay(record)
    agent.orders.change(record)
    agent.replace(going)
    log.info("changed: replicas %s", ", ".join(sorted(here)) or "none")
    agent.outposts.change(record)
    agent.changed()
    for outpost in agent.outposts:
        await outpost.client.change(record)
    link = agent.links.get(ROUTER)
    if link is not None:
        await link.send(agent.orders.router_assignment())
