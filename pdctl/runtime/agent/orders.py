"""What one agent starts and assigns, from its cluster's record: commands and messages as data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pdctl.engines.channel import (
    REPLICA_ENV,
    RUN_ENV,
    SOCKET_ENV,
    Assignment,
    HandoffSettings,
    RouterAssignment,
    StoreAssignment,
)
from pdctl.engines.interface import Command
from pdctl.engines.registry import spec_for
from pdctl.handoff.store.interface import StoreSeat
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.supervisor import Order
from pdctl.runtime.cluster.certificate import cluster_certificate
from pdctl.runtime.cluster.state import ClusterRecord, StateDir, handoff_key
from pdctl.topology.plan import Plan, ReplicaPlan
from pdctl.topology.sharing import StorePlan


class Orders:
    """Commands, environments and assignments of one host."""

    def __init__(
        self,
        record: ClusterRecord,
        state: StateDir,
        host: str,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.record = record
        self.host = host
        self.journal_path = state.journal(host)
        self.socket_path = f"{record.socket_dir}/{host}.sock"
        self._state = state
        self.key = state.read_key()
        """The cluster's, from which the others are derived."""
        self._key = handoff_key(self.key)
        self._api_key = state.read_api_key()
        self._environ = dict(os.environ if environ is None else environ)

    def change(self, record: ClusterRecord) -> None:
        """Takes a changed cluster, written down first: what is started from now on follows it.

        Raises:
            HostError: it can't be written; nothing has changed.
        """
        self._state.write(record)
        self.record = record
        self._api_key = self._state.read_api_key()

    @property
    def store(self) -> StorePlan | None:
        """This host's page store, where it has one."""
        return self.record.plan.store(self.host)

    def maker(self, name: str) -> Callable[[], Order]:
        """What makes the order for one replica, or the router, whenever it is started."""
        return lambda: Order(
            command=self.command(name),
            base=self._base(),
            log=self._state.log(name),
            run=self.record.run,
        )

    def command(self, name: str) -> Command:
        """The whole command, with what ties the process to this agent."""
        if name == ROUTER:
            command = Command(argv=(sys.executable, "-m", "pdctl.runtime.router"))
        elif self.store is not None and name == self.store.name:
            command = Command(argv=(sys.executable, "-m", "pdctl.runtime.store"))
        else:
            command = self._engine_command(self.record.plan.replica(name))
        ties = {
            SOCKET_ENV: self.socket_path,
            REPLICA_ENV: name,
            RUN_ENV: self.record.run,
            "PYTHONUNBUFFERED": "1",
        }
        argv = (str(Path(command.argv[0]).expanduser()), *command.argv[1:])
        return Command(argv=argv, env={**command.env, **ties}, cwd=command.cwd)

    def _engine_command(self, plan: ReplicaPlan) -> Command:
        host = self.record.topology.hosts[plan.host]
        return spec_for(plan.engine).command(plan, host, self.record.plan)

    def _base(self) -> dict[str, str]:
        """Engines need no API key of the router's: they listen on loopback."""
        secret = self.record.topology.router.api_key_env
        return {k: v for k, v in self._environ.items() if k != secret}

    def assignment(self, plan: ReplicaPlan) -> Assignment:
        record = self.record
        handoff = record.topology.handoff
        return Assignment(
            cluster=record.cluster,
            replica=plan.name,
            role=plan.role,
            key=self._key,
            contract=record.contract,
            compute_dtype=plan.compute_dtype,
            data_host=plan.data_host,
            data_port=plan.data_port,
            native=plan.native,
            transports=record.plan.transports(plan.name),
            device_pages=record.plan.on_device(plan.name),
            handoff=HandoffSettings(
                timeout_s=handoff.timeout_s,
                on_failure=handoff.on_failure,
                buffer_bytes=record.plan.buffer_bytes or 0,
                encrypt=handoff.encrypt,
            ),
            certificate=cluster_certificate(self.key) if handoff.encrypt else None,
            store=self._seat if record.plan.store_of(plan) is not None else None,
        )

    @property
    def _seat(self) -> StoreSeat:
        return StoreSeat(socket=f"{self.record.socket_dir}/{self.host}.kv")

    def store_assignment(self, store: StorePlan) -> StoreAssignment:
        record = self.record
        encrypt = record.topology.handoff.encrypt
        return StoreAssignment(
            cluster=record.cluster,
            host=self.host,
            key=self._key,
            contract=record.contract,
            seat=self._seat,
            buffer_bytes=store.buffer_bytes,
            data_host=store.data_host,
            data_port=store.data_port,
            others={
                other.host: (other.data_host, other.data_port)
                for other in record.plan.stores
                if other.host != self.host and other.data_port is not None
            },
            certificate=cluster_certificate(self.key) if encrypt else None,
        )

    def router_assignment(self) -> RouterAssignment:
        record = self.record
        return RouterAssignment(
            cluster=record.cluster,
            run=record.run,
            key=self._key,
            plan=record.plan,
            contract=record.contract,
            api_key=self._api_key,
            policy=record.topology.router.policy.value,
            on_failure=record.topology.handoff.on_failure,
            model_dir=_model_dir(record.plan, self.host),
            disaggregate=record.topology.router.disaggregate,
            costs_path=str(self._state.costs),
        )


def _model_dir(plan: Plan, host: str) -> str:
    """A checkpoint on the router's host, for its tokenizer; "" where it has none."""
    for replica in plan.replicas:
        if replica.host == host:
            return str(Path(replica.model).expanduser())
    return ""
