"""Rules across fields, and what this version refuses by name."""

from __future__ import annotations

import pytest
from topology.texts import GOOD, ORDINARY, edited

from pdctl.topology import rules
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.load import loads
from pdctl.topology.model import Dtype


def found(text: str) -> list[Diagnostic]:
    return loads(text)[1]


def codes(text: str) -> list[str]:
    return [d.code.removeprefix("topology.") for d in found(text)]


def without(replica: str) -> str:
    head, *replicas = GOOD.split("[[replicas]]")
    return head + "".join(f"[[replicas]]{r}" for r in replicas if f'"{replica}"' not in r)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (edited('"d0"', '"p0"'), "duplicate_name", 'two replicas are named "p0"'),
        (edited('"d0"', '"router"'), "reserved_name", '"router"'),
        (
            edited('name = "d0"', 'name = "d0"\nhost = "gpu1"')
            + '[hosts.gpu]\naddress = "1.2.3.4"',
            "unknown_host",
            'replica "d0": there is no host "gpu1"',
        ),
        (
            edited("[router]", '[router]\nhost = "x"'),
            "unknown_host",
            'router: there is no host "x"',
        ),
        (without("d0"), "no_decode", 'replica "p0": there is no decode replica'),
        (without("p0"), "no_prefill", 'replica "d0": there is no prefill replica'),
        (GOOD.partition("[[replicas]]")[0], "no_replicas", "has no replicas"),
        (
            edited('name = "d0"', 'name = "d0"\nhttp_port = 8000'),
            "port_clash",
            'port 8000 on host "local" is claimed by replica "d0" http_port and by the router',
        ),
        (edited('"/models/tiny"', '"models/tiny"'), "relative_path", 'model "models/tiny"'),
        (
            edited('name = "d0"', 'name = "d0"\npython = "venv/bin/python"'),
            "relative_path",
            'python "venv/bin/python"',
        ),
        (
            edited("timeout_s = 30", 'transport = "nixl"'),
            "nixl_engines",
            'pair "p0" → "d0": transport "nixl"',
        ),
    ],
)
def test_a_broken_rule_is_one_error_with_names(text: str, code: str, words: str) -> None:
    """R52: a combination that can't work is refused from the file alone, by name."""
    diagnostics = found(text)
    assert codes(text) == [code], diagnostics
    assert words in diagnostics[0].summary
    assert diagnostics[0].severity is Severity.ERROR
    assert diagnostics[0].hint


def test_sharing_with_one_replica_is_warned_and_off() -> None:
    """R57: sharing between fewer than two ordinary replicas is a warning."""
    topology, diagnostics = loads(GOOD + ORDINARY + "[sharing]\n")
    assert topology is not None
    assert [(d.code, d.severity) for d in diagnostics] == [
        ("topology.sharing_off", Severity.WARNING)
    ]


def test_sglangs_halves_answer_nothing_alone_and_validate_says_so() -> None:
    """DESIGN §7: a pair of SGLang has no baseline, until somebody else could compute a prompt."""
    both = GOOD.replace('engine = "mlx"', 'engine = "sglang"')
    assert [(d.code, d.severity) for d in found(both)] == [
        ("topology.no_baseline", Severity.WARNING)
    ]
    assert codes(both + ORDINARY) == []
    assert codes(both.replace('engine = "sglang"', 'engine = "mlx"', 1)) == []


def test_a_decode_replica_that_computes_no_prompt_cannot_recompute_one() -> None:
    """R72: refused before anything is launched, by the replica's name."""
    text = GOOD.replace('engine = "mlx"', 'engine = "sglang"') + ORDINARY
    text = text.replace("[handoff]", '[handoff]\non_failure = "recompute"')
    (problem,) = found(text)
    assert problem.code == "topology.no_recompute"
    assert '"d0"' in problem.summary
    prefill_alone = text.replace('"sglang"\nrole = "decode"', '"mlx"\nrole = "decode"')
    assert codes(prefill_alone) == []


def test_ports_of_different_hosts_do_not_clash() -> None:
    """U25: only ports of one host can collide; the router's port counts on its host."""
    two = edited('name = "d0"', 'name = "d0"\nhost = "b"\nhttp_port = 8000')
    two = two.replace('name = "p0"', 'name = "p0"\naddress = "10.0.0.1"\nhttp_port = 9000')
    assert codes(two + '[hosts.b]\nssh = "b"\n') == []


def test_a_sender_needs_an_address_that_others_can_dial() -> None:
    """U31: a prefill replica whose decode peer is on another host needs an address; R59: a
    wildcard is not one."""
    apart = edited('name = "d0"', 'name = "d0"\nhost = "b"') + '[hosts.b]\nssh = "b"\n'
    assert codes(apart) == ["no_address"]
    assert codes(apart + '[hosts.local]\naddress = "192.168.1.2"\n') == []
    assert codes(apart + '[hosts.local]\naddress = "fe80::1"\n') == []
    wildcard = found(apart + '[hosts.local]\naddress = "0.0.0.0"\n')
    assert "topology.bad_address" in [d.code for d in wildcard]


def test_an_open_router_without_a_key_is_warned() -> None:
    """R60: beyond loopback, a router without a key serves everybody."""
    opened = edited("127.0.0.1:8000", "0.0.0.0:8000")
    assert codes(opened) == ["open_router"]
    assert codes(opened.replace("[router]", '[router]\napi_key_env = "KEY"')) == []
    assert codes(edited("127.0.0.1:8000", "[::1]:8000")) == []
    assert codes(edited("127.0.0.1:8000", "localhost:8000")) == []


def test_an_unused_port_is_warned() -> None:
    assert codes(edited('name = "d0"', 'name = "d0"\ndata_port = 7000')) == ["unused_port"]


def test_the_key_must_be_in_the_environment() -> None:
    """api_key_env names a variable; unset and empty ones are errors of the launch."""
    topology, _ = loads(edited("[router]", '[router]\napi_key_env = "KEY"'))
    assert topology is not None
    assert rules.check_environment(topology, {"KEY": "secret"}) == []
    assert "not set" in rules.check_environment(topology, {})[0].summary
    assert "empty" in rules.check_environment(topology, {"KEY": " "})[0].summary


def test_where_nothing_is_launched_a_missing_key_is_a_warning() -> None:
    topology, _ = loads(edited("[router]", '[router]\napi_key_env = "KEY"'))
    assert topology is not None
    (found,) = rules.check_environment(topology, {}, Severity.WARNING)
    assert found.severity is Severity.WARNING
    assert found.hint == "export KEY=… before `up`, or leave api_key_env away"


def contract(context_length: int = 2048) -> Contract:
    return Contract(
        weights="w",
        tokenizer="t",
        chat_template="c",
        attention=Attention(kind="full", layers=30, kv_heads=3, head_dim=64),
        positions=Positions(rope_theta=1e5, max_positions=8192, context_length=context_length),
        dtype=Dtype.FLOAT16,
    )


def test_a_small_budget_is_warned_with_the_longest_prompt() -> None:
    """A budget of 100 pages and a half admits 6400 tokens' worth of whole pages, not more."""
    page = contract().page_bytes
    text = edited("2048", "8192").replace(
        "timeout_s = 30", f"buffer_bytes = {100 * page + page // 2}"
    )
    topology, _ = loads(text)
    assert topology is not None
    (warning,) = rules.check_buffer(topology, contract(8192))
    assert warning.severity is Severity.WARNING
    assert "6400 tokens" in warning.summary
    roomy, _ = loads(edited("timeout_s = 30", 'buffer_bytes = "1GiB"'))
    assert roomy is not None
    assert rules.check_buffer(roomy, contract()) == []


@pytest.mark.parametrize("pages", [0, 1])
def test_a_budget_that_the_canary_does_not_fit_into_is_refused(pages: int) -> None:
    """Every launch would end at its first pair."""
    budget = (pages + 1) * contract().page_bytes - 1
    topology, _ = loads(edited("timeout_s = 30", f"buffer_bytes = {budget}"))
    assert topology is not None
    (error,) = rules.check_buffer(topology, contract())
    assert error.severity is Severity.ERROR
    assert error.field == "handoff.buffer_bytes"
    assert f"holds {pages} pages" in error.summary


def far(address: str) -> str:
    """p0 at `address` on a host with SSH, d0 on another."""
    text = edited('name = "p0"', 'name = "p0"\nhost = "a"')
    text = text.replace('name = "d0"', 'name = "d0"\nhost = "b"')
    return f'{text}[hosts.a]\nssh = "a"\naddress = "{address}"\n[hosts.b]\nssh = "b"\n'


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "[::1]"])
def test_a_loopback_address_is_no_way_to_another_host(address: str) -> None:
    """R59, U31: refused from the file alone, naming the replica, the address and the other
    host."""
    told = [d for d in found(far(address)) if d.code == "topology.loopback_address"]
    assert len(told) == 1
    assert told[0].summary.startswith('replica "p0": its address ')
    assert told[0].summary.endswith('which decode replica "d0" on host "b" can\'t dial')
    assert told[0].field == "hosts.a.address"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]"])
def test_a_wildcard_is_no_address(address: str) -> None:
    """R59, U15: what one listens on is not what others dial."""
    assert "bad_address" in codes(far(address))


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "[fd00::1]", "gpu1.lan"])
def test_addresses_of_every_kind_are_taken(address: str) -> None:
    """R59: IPv4, IPv6 and names."""
    assert {"bad_address", "loopback_address", "no_address"}.isdisjoint(codes(far(address)))


def test_this_machine_may_have_an_address() -> None:
    """A local prefill replica is dialled by others: [hosts.local] carries its address, and a
    loopback one is refused there too."""
    text = edited('name = "d0"', 'name = "d0"\nhost = "b"') + '[hosts.b]\nssh = "b"\n'
    assert "no_address" in codes(text)
    assert "no_address" not in codes(text + '[hosts.local]\naddress = "192.168.1.2"\n')
    assert "loopback_address" in codes(text + '[hosts.local]\naddress = "127.0.0.1"\n')


def test_a_replicas_own_address_counts_first() -> None:
    """Its field is the one that is named."""
    text = far("10.0.0.1").replace('host = "a"', 'host = "a"\naddress = "127.0.0.1"')
    told = [d for d in found(text) if d.code == "topology.loopback_address"]
    assert [d.field for d in told] == ["replicas[0].address"]


def test_a_router_elsewhere_can_not_reach_this_machine() -> None:
    """The keeper starts agents over SSH: a host without a destination is out of its reach,
    and is named once."""
    text = edited("[router]", '[router]\nhost = "a"') + '[hosts.a]\nssh = "a"\n'
    told = [d for d in found(text) if d.code == "topology.no_route"]
    assert [(d.replica, d.field) for d in told] == [("p0", "replicas[0].host")]
    assert 'the router runs on host "a", which can\'t reach host "local"' in told[0].summary
    assert "no_route" not in codes(far("10.0.0.1"))


def test_this_machine_is_one_host() -> None:
    """Two hosts without a destination would be one machine with two agents: each further one is
    named once, and nothing else is said of it."""
    two = edited('name = "p0"', 'name = "p0"\nhost = "gpu"').replace(
        'name = "d0"', 'name = "d0"\nhost = "gpu"'
    )
    (told,) = found(two + "[hosts.gpu]\n")
    assert (told.code, told.replica, told.field) == (
        *("topology.one_machine", "p0"),
        "replicas[0].host",
    )
    assert 'its host "gpu" is this machine, and so is the router\'s host "local"' in told.summary
    assert codes(two.replace("[router]", '[router]\nhost = "gpu"') + "[hosts.gpu]\n") == []
    apart = two.replace('"d0"\nhost = "gpu"', '"d0"\nhost = "box"') + "[hosts.gpu]\n[hosts.box]\n"
    assert codes(apart) == ["one_machine"] * 2
    assert codes(GOOD + "[hosts.gpu]\n") == []


def test_prefixes_are_read_where_a_tokenizer_is() -> None:
    """U24: without token ids there is no key; it is said before anything is launched."""
    here = edited("[router]", '[router]\npolicy = "prefix"')
    assert codes(here) == []
    away = far("10.0.0.1").replace("[router]", '[router]\npolicy = "prefix"')
    assert codes(away) == ["unread_prefixes"]
    assert found(away)[0].severity is Severity.WARNING
