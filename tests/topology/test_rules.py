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
        (edited('"mlx"', '"vllm"'), "unsupported_engine", '"vllm" is not in this version'),
        (edited('"mlx"', '"sglang"'), "unsupported_engine", '"sglang" is not in this version'),
        (
            edited("timeout_s = 30", 'transport = "nixl"'),
            "unsupported_transport",
            'pair "p0" → "d0": transport "nixl"',
        ),
        (
            edited("timeout_s = 30", 'transport = "native"'),
            "unsupported_transport",
            'pair "p0" → "d0": transport "native"',
        ),
        (
            edited("[router]", '[router]\npolicy = "prefix"'),
            "unsupported_policy",
            'policy = "prefix" is not in this version',
        ),
        (
            edited("[router]", '[router]\ndisaggregate = "auto"'),
            "unsupported_disaggregate",
            'disaggregate = "auto"',
        ),
        (GOOD + '[hosts.gpu1]\nssh = "gpu1"\n', "unsupported_ssh", 'host "gpu1"'),
        (
            GOOD + ORDINARY + ORDINARY.replace("o0", "o1") + "[sharing]\n",
            "unsupported_sharing",
            "[sharing] is not in this version",
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


def test_ports_of_different_hosts_do_not_clash() -> None:
    """U25: only ports of one host can collide; the router's port counts on its host."""
    two = edited('name = "d0"', 'name = "d0"\nhost = "b"\nhttp_port = 8000')
    two = two.replace('name = "p0"', 'name = "p0"\naddress = "10.0.0.1"\nhttp_port = 9000')
    assert codes(two + "[hosts.b]\n") == []


def test_a_sender_needs_an_address_that_others_can_dial() -> None:
    """U31: a prefill replica whose decode peer is on another host needs an address; R59: a
    wildcard is not one."""
    apart = edited('name = "d0"', 'name = "d0"\nhost = "b"') + "[hosts.b]\n"
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
