from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from runtime.clusters import written

from pdctl.engines.channel import REPLICA_ENV, RUN_ENV, SOCKET_ENV
from pdctl.runtime.agent.orders import Orders
from pdctl.runtime.cluster.certificate import cluster_certificate
from pdctl.runtime.cluster.state import ClusterRecord, StateDir, handoff_key
from pdctl.runtime.machine import process
from pdctl.runtime.machine.process import ACTOR_KEY_ENV
from pdctl.topology.model import Transport


def with_api_key(record: ClusterRecord, state: StateDir) -> ClusterRecord:
    router = msgspec.structs.replace(record.topology.router, api_key_env="MY_KEY")
    state.write_api_key("opensesame")
    return msgspec.structs.replace(
        record, topology=msgspec.structs.replace(record.topology, router=router)
    )


def test_a_replicas_command_is_the_engines_with_its_ties(tmp_path: Path) -> None:
    """The engine's argv, and socket, name and run in the environment: nothing else is added."""
    with written(tmp_path) as (state, record):
        orders = Orders(record, state, "local", environ={})
        order = orders.maker("p0")()
        assert order.command.argv[1:3] == ("-m", "pdctl.engines.mlx.server")
        assert str(record.plan.replica("p0").http_port) in order.command.argv
        assert order.command.env[SOCKET_ENV] == f"{record.socket_dir}/local.sock"
        assert order.command.env[REPLICA_ENV] == "p0"
        assert order.command.env[RUN_ENV] == record.run
        assert order.log == state.log("p0")


def test_the_router_runs_in_the_agents_own_environment(tmp_path: Path) -> None:
    """`python -m pdctl.runtime.router`, told everything over its socket."""
    with written(tmp_path) as (state, record):
        command = Orders(record, state, "local", environ={}).command("router")
        assert command.argv == (sys.executable, "-m", "pdctl.runtime.router")
        assert command.env[REPLICA_ENV] == "router"


def test_started_processes_get_no_key_of_others(tmp_path: Path) -> None:
    """Neither the actor key nor the router's API key is in an engine's environment."""
    environ = {ACTOR_KEY_ENV: "actor", "MY_KEY": "opensesame", "PATH": "/bin"}
    with written(tmp_path) as (state, record):
        record = with_api_key(record, state)
        order = Orders(record, state, "local", environ=environ).maker("p0")()
        environment = process.environment(order.command, order.base)
        assert environment["PATH"] == "/bin"
        assert not {"actor", "opensesame", state.read_key()} & set(environment.values())
        assert not {ACTOR_KEY_ENV, "MY_KEY"} & set(environment)


def test_assignments_carry_the_handoff_key_and_the_budget(tmp_path: Path) -> None:
    """A replica gets the derived key, never the cluster's own; the router its API key."""
    with written(tmp_path) as (state, record):
        record = with_api_key(record, state)
        orders = Orders(record, state, "local", environ={})
        assigned = orders.assignment(record.plan.replica("p0"))
        assert assigned.key == handoff_key(state.read_key())
        assert assigned.handoff.buffer_bytes == 1 << 20
        assert assigned.data_port == record.plan.replica("p0").data_port
        assert orders.assignment(record.plan.replica("d0")).data_port is None
        assert assigned.certificate is None
        router = orders.router_assignment()
        assert (router.api_key, router.key) == ("opensesame", assigned.key)
        assert router.model_dir == str(tmp_path)


def test_each_replica_is_told_how_the_pages_of_its_pairs_move(tmp_path: Path) -> None:
    """As the plan says, peer by peer; nothing is left to either end to find out."""
    with written(tmp_path) as (state, record):
        pairs = tuple(
            msgspec.structs.replace(pair, transport=Transport.NIXL) for pair in record.plan.pairs
        )
        plan = msgspec.structs.replace(record.plan, pairs=pairs)
        orders = Orders(msgspec.structs.replace(record, plan=plan), state, "local", environ={})
        assert orders.assignment(plan.replica("p0")).transports == {"d0": Transport.NIXL}
        assert orders.assignment(plan.replica("d0")).transports == {"p0": Transport.NIXL}


def test_an_encrypted_clusters_replicas_share_one_certificate(tmp_path: Path) -> None:
    """Each agent derives the same one from the key; neither the key nor it is in an environment."""
    with written(tmp_path) as (state, record):
        handoff = msgspec.structs.replace(record.topology.handoff, encrypt=True)
        topology = msgspec.structs.replace(record.topology, handoff=handoff)
        record = msgspec.structs.replace(record, topology=topology)
        orders = [Orders(record, state, "local", environ={}) for _ in range(2)]
        names = ("p0", "d0")
        first, second = (
            made.assignment(record.plan.replica(name))
            for made, name in zip(orders, names, strict=True)
        )
        assert first.certificate is not None
        assert first.certificate == second.certificate == cluster_certificate(state.read_key())
        assert first.certificate.key_pem not in repr(first)
        environment = orders[0].command("p0").env.values()
        assert not any("PRIVATE KEY" in value for value in environment)
