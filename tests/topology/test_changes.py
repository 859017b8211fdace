"""What `up` would change in a running cluster."""

from __future__ import annotations

import msgspec
import pytest

from pdctl.topology.changes import Changes, Declared, changes
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.load import loads
from pdctl.topology.model import Dtype
from pdctl.topology.plan import derive

CONTRACT = Contract(
    weights="w",
    tokenizer="t",
    chat_template="c",
    attention=Attention(kind="full", layers=2, kv_heads=1, head_dim=8),
    positions=Positions(rope_theta=1e4, max_positions=512, context_length=256),
    dtype=Dtype.FLOAT16,
)

BASE = """
schema = 1
name = "c"
[model]
name = "tiny"
context_length = 256
[handoff]
timeout_s = 60.0
[router]
bind = "127.0.0.1:8000"
[hosts.local]
python = "/venv/python"
env = { A = "1" }
[[replicas]]
name = "p0"
engine = "mlx"
role = "prefill"
model = "/m"
[[replicas]]
name = "d0"
engine = "mlx"
role = "decode"
model = "/m"
"""

P1 = """
[[replicas]]
name = "p1"
engine = "mlx"
role = "prefill"
model = "/m"
"""
O0 = P1.replace("p1", "o0").replace("prefill", "both")


def declared(
    text: str, *, before: Declared | None = None, contract: Contract = CONTRACT
) -> Declared:
    topology, found = loads(text)
    assert topology is not None, found
    plan = derive(topology, contract, kept=before.plan if before else None)
    return Declared(topology=topology, plan=plan, contract=contract)


def changed(*edits: tuple[str, str], add: str = "", text: str = BASE) -> Changes:
    before = declared(text)
    after = text
    for old, new in edits:
        assert old in after
        after = after.replace(old, new)
    return changes(before, declared(after + add, before=before))


def fields(found: tuple) -> list[str]:
    return [change.field for change in found]


def test_the_same_file_changes_nothing() -> None:
    assert changed().nothing


def test_comments_order_of_keys_and_spelt_out_defaults_change_nothing() -> None:
    found = changed(
        ('name = "p0"\nengine = "mlx"', '# the first\nengine = "mlx"\nname = "p0"'),
        ("timeout_s = 60.0", 'timeout_s = 60\non_failure = "error"'),
    )
    assert found.nothing


def test_replicas_come_and_go() -> None:
    """Those that stay keep their ports, wherever in the file a new one stands."""
    found = changed(('[[replicas]]\nname = "p0"', O0 + '[[replicas]]\nname = "p0"'))
    assert found == Changes(added=("o0",))
    assert list(found.lines()) == ["+ o0"]
    found = changed((P1, ""), text=BASE + P1)
    assert found == Changes(removed=("p1",))


def test_a_rename_is_a_removal_and_an_addition() -> None:
    found = changed(('name = "p0"', 'name = "p7"'))
    assert (found.removed, found.added, found.restarted) == (("p0",), ("p7",), {})


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (('role = "decode"', 'role = "decode"\nengine_config = { prefill_step_size = 64 }'),
         "engine_config.prefill_step_size"),
        (('role = "decode"', 'role = "decode"\nenv = { B = "2" }'), "env.B"),
        (('role = "decode"', 'role = "decode"\npython = "/other/python"'), "python"),
        (('role = "decode"', 'role = "decode"\nhttp_port = 9100'), "http_port"),
        (('role = "decode"', 'role = "decode"\ncompute_dtype = "float32"'), "compute_dtype"),
        (('role = "decode"\nmodel = "/m"', 'role = "decode"\nmodel = "/copy"'), "model"),
    ],
)  # fmt: skip
def test_one_replicas_own_field_restarts_that_one(edit: tuple[str, str], field: str) -> None:
    found = changed(edit)
    assert {name: fields(c) for name, c in found.restarted.items()} == {"d0": [field]}
    assert msgspec.structs.replace(found, restarted={}).nothing


def test_a_hosts_settings_restart_its_replicas() -> None:
    found = changed(('A = "1"', 'A = "2"'))
    assert {name: fields(c) for name, c in found.restarted.items()} == {
        "p0": ["env.A"],
        "d0": ["env.A"],
    }


def test_a_value_of_an_environment_is_never_shown() -> None:
    """It may be a secret: the name is all that is told."""
    found = changed(('A = "1"', 'A = "hunter2"'))
    assert list(found.lines()) == ["~ p0: env.A (restart)", "~ d0: env.A (restart)"]


def test_handoff_settings_restart_who_is_told_them() -> None:
    found = changed(
        ("timeout_s = 60.0", 'timeout_s = 60.0\nbuffer_bytes = "64MiB"'), text=BASE + O0
    )
    assert {name: fields(c) for name, c in found.restarted.items()} == {
        "p0": ["handoff.buffer_bytes"]
    }
    found = changed(("timeout_s = 60.0", "timeout_s = 30.0"), text=BASE + O0)
    assert list(found.restarted) == ["p0", "d0"]


def test_the_router_takes_its_policy_while_serving_and_its_address_by_a_restart() -> None:
    found = changed(("127.0.0.1:8000", "127.0.0.1:8001"))
    assert fields(found.rebound) == ["router.bind"]
    found = changed(("[router]", '[router]\npolicy = "round_robin"'))
    assert fields(found.routed) == ["router.policy"]
    assert list(found.lines()) == [
        "~ router: router.policy: least_loaded → round_robin (while it serves)"
    ]


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (('name = "tiny"', 'name = "other"'), "model.name"),
        (("context_length = 256", "context_length = 128"), "model.context_length"),
        (("timeout_s = 60.0", "timeout_s = 60.0\nencrypt = true"), "handoff.encrypt"),
    ],
)
def test_what_the_whole_cluster_agreed_on_is_refused(edit: tuple[str, str], field: str) -> None:
    before = declared(BASE)
    after = declared(BASE.replace(*edit), before=before)
    assert fields(changes(before, after).refused) == [field]


def test_other_weights_under_the_same_path_are_refused() -> None:
    """The contract is the cluster's: what differs is named."""
    before = declared(BASE)
    other = msgspec.structs.replace(CONTRACT, weights="v", tokenizer="u")
    assert fields(changes(before, declared(BASE, before=before, contract=other)).refused) == [
        "weights",
        "tokenizer",
    ]


def test_other_hosts_are_refused() -> None:
    """No agent runs there, and the keeper stays where it is."""
    before = declared(BASE)
    far = '[hosts.far]\nssh = "far"\naddress = "10.0.0.2"\n[[replicas]]'
    text = BASE.replace('python = "/venv', 'address = "10.0.0.1"\npython = "/venv')
    text = text.replace("[[replicas]]", far, 1).replace('name = "d0"', 'name = "d0"\nhost = "far"')
    found = changes(before, declared(text, before=before))
    assert fields(found.refused) == ["hosts.far"]
    assert (found.removed, found.added) == (("d0",), ("d0",))


def test_a_new_way_to_an_engine_on_another_host_has_a_port_of_its_own() -> None:
    """What runs there is not in the way: a replica comes, or is reached at another port, with a
    forward that was not there before."""
    base = BASE.replace('python = "/venv', 'address = "10.0.0.1"\npython = "/venv')
    base = base.replace(
        "[[replicas]]", '[hosts.far]\nssh = "far"\naddress = "10.0.0.2"\n[[replicas]]', 1
    )
    base = base.replace('name = "d0"', 'name = "d0"\nhost = "far"')
    found = changed(add=P1.replace('name = "p1"', 'name = "p1"\nhost = "far"'), text=base)
    assert (found.refused, found.added, found.restarted) == ((), ("p1",), {})
    moved = base.replace('role = "decode"', 'role = "decode"\nhttp_port = 9100')
    before, after = declared(base), declared(moved, before=declared(base))
    found = changes(before, after)
    assert (found.refused, fields(found.restarted["d0"])) == ((), ["http_port"])
    routes = [one.plan.replica("d0").route_port for one in (before, after)]
    assert routes[0] != routes[1]
    found = changed(('role = "decode"', 'role = "decode"\nenv = { B = "2" }'), text=base)
    assert (found.refused, list(found.restarted)) == ((), ["d0"])


def test_a_replica_that_an_interrupted_change_left_is_started_again() -> None:
    before = declared(BASE)
    found = changes(before, declared(BASE, before=before), unsettled=["d0"])
    assert list(found.restarted) == ["d0"]
