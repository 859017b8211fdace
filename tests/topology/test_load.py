"""Reading a topology: every problem named, in one pass, with its place and a hint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology.texts import GOOD, edited

from pdctl.errors import TopologyError
from pdctl.runtime.cluster.state import declared_name
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.load import load, loads, nearest
from pdctl.topology.model import Engine, OnFailure, Role, Transport


def problems(text: str) -> list[Diagnostic]:
    topology, found = loads(text)
    assert topology is None or not any(d.severity == "error" for d in found)
    return found


def only(text: str) -> Diagnostic:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


def test_a_good_file_is_read_whole() -> None:
    """Values arrive typed, defaults are filled in, and "local" is always a host."""
    topology, found = loads(GOOD)
    assert found == []
    assert topology is not None
    assert topology.name == "studio"
    assert topology.handoff.timeout_s == 30.0
    assert topology.handoff.transport is Transport.AUTO
    assert topology.handoff.on_failure is OnFailure.ERROR
    assert [(r.name, r.role) for r in topology.replicas] == [
        ("p0", Role.PREFILL),
        ("d0", Role.DECODE),
    ]
    assert topology.replica("p0").engine is Engine.MLX
    assert list(topology.hosts) == ["local"]


@pytest.mark.parametrize(
    ("text", "code", "field", "words"),
    [
        ("", "empty", None, "is empty"),
        ("a = \n", "syntax", None, "line 1"),
        ("a = 1\na = 2\n", "syntax", None, "line 2"),
        (edited("role", "rol"), "unknown_key", "replicas[0].rol", 'unknown key "rol"'),
        (edited("timeout_s", "timout_s"), "unknown_key", "handoff.timout_s", "handoff: "),
        (edited('"mlx"', '"mlxx"'), "unknown_engine", "replicas[0].engine", '"mlxx"'),
        (edited('"prefill"', '"prefil"'), "bad_value", "replicas[0].role", '"prefil"'),
        (edited("2048", '"2048"'), "wrong_type", "model.context_length", "is text"),
        (edited("2048", "0"), "bad_value", "model.context_length", "is 0"),
        (edited('name = "p0"\n', ""), "missing_field", "replicas[0].name", "name is missing"),
        (edited('"studio"', '"Studio!"'), "bad_name", "name", '"Studio!"'),
        (edited('"127.0.0.1:8000"', '"127.0.0.1"'), "bad_bind", "router.bind", "port is missing"),
        (edited("schema = 1", "schema = 2"), "bad_schema", "schema", "is 2"),
        (
            edited("timeout_s = 30", 'buffer_bytes = "3MB"'),
            "bad_size",
            "handoff.buffer_bytes",
            '"3MB"',
        ),
        (edited("[model]", "[model_]"), "unknown_key", "model_", '"model_"'),
    ],
)
def test_each_fault_is_named_with_its_place(
    text: str, code: str, field: str | None, words: str
) -> None:
    """One fault gives one diagnostic: what is wrong, and where."""
    found = only(text)
    assert found.code == f"topology.{code}"
    assert found.field == field
    assert words in found.summary


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = tmp_path / "topology.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load(path)[1] == []


def test_every_wrong_type_says_how_to_write_the_right_one() -> None:
    """The hint is about TOML: quotes, brackets, true and false."""
    for good, bad in (('"studio"', "5"), ("2048", '"2048"'), ("schema = 1", "hosts = 1")):
        wrong = [d for d in problems(edited(good, bad)) if d.code == "topology.wrong_type"]
        assert wrong
        assert all(d.hint for d in wrong)


def test_a_number_without_end_is_a_syntax_error() -> None:
    """Python's limit on digits is not told as advice."""
    found = only("schema = " + "9" * 5000)
    assert (found.code, "thousands of digits" in found.summary) == ("topology.syntax", True)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "0.0", "1e400"])
def test_a_timeout_is_finite_and_above_zero(value: str) -> None:
    """R8: 0, negative, nan and inf are refused."""
    assert only(edited("timeout_s = 30", f"timeout_s = {value}")).code == "topology.bad_timeout"


def test_a_misspelt_key_names_the_nearest_one() -> None:
    """U32: a typo in a key is never dropped in silence; the hint has the known name."""
    assert only(edited("role", "rol")).hint == 'did you mean "role"?'
    assert nearest("httpport", ["http_port", "data_port"]) == "http_port"
    assert nearest("zzz", ["http_port"]) is None


def test_a_broken_replica_hides_no_other_problem() -> None:
    """Problems of one table leave the other tables, and the rules across them, checked."""
    text = GOOD.replace("timeout_s = 30", "timeout_s = -1")
    text = text.replace('engine = "mlx"\nrole = "prefill"', 'engine = "tpu"\nrole = "prefill"')
    text = text.replace('role = "decode"\nmodel = "/models/tiny"', 'role = "decode"\nmodel = "m"')
    text += 'hostt = "x"\n[[replicas]]\nname = "d0"\nengine = "mlx"\nrole = "both"\nmodel = "/m"\n'
    text += 'host = "gpu1"\n'
    codes = [d.code.removeprefix("topology.") for d in problems(text)]
    assert codes == [
        "bad_timeout",
        "unknown_engine",
        "unknown_key",
        "duplicate_name",
        "unknown_host",
        "unknown_host",
        "relative_path",
    ]


def test_wrong_shapes_are_named() -> None:
    """A table where a list belongs, and the like, is a sentence and not a traceback."""
    assert only(edited('[model]\nname = "tiny"\n', '[model]\nname = ["tiny"]\n')).code == (
        "topology.wrong_type"
    )
    flat = GOOD.replace("[[replicas]]", "[replicas]", 1).partition("[[replicas]]")[0]
    assert [d.code for d in problems(flat)] == ["topology.wrong_type"]


def test_a_missing_file_is_a_diagnostic(tmp_path: Path) -> None:
    """Reading never raises for what the disk has or lacks."""
    topology, found = load(tmp_path / "missing.toml")
    assert topology is None
    assert [d.code for d in found] == ["topology.missing"]
    assert "missing.toml" in found[0].summary
    assert load(tmp_path)[1][0].code == "topology.unreadable"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert load(binary)[1][0].code == "topology.syntax"


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    """A pipe without a writer would be waited for, a device read without end."""
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        (problem,) = load(path)[1]
        assert problem.code == "topology.unreadable"
        assert problem.summary == f"{path} can't be read: it is no regular file"
        with pytest.raises(TopologyError):
            declared_name(path)


WORDS = st.sampled_from(
    [*GOOD.splitlines(), "[", "]", "=", '"', "[[replicas]]", "[hosts.x]", "env = {a = 1}", "\n",
     "1e999", "-inf", "name = 3", "host = []", "engine_config = 1", "replicas = [1, {}]"]
)  # fmt: skip


@given(st.lists(WORDS | st.text(max_size=8), max_size=25).map("\n".join))
def test_no_text_makes_the_loader_raise(text: str) -> None:
    """Arbitrary TOML-like text gives a topology or diagnostics, never an exception."""
    topology, found = loads(text)
    assert topology is not None or found
    assert all(d.code.startswith("topology.") and d.summary for d in found)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(["name", "role", "engine", "host", "model", "env", "devices", "http_port",
                        "ssh", "bind", "rol", "engine_config", "timeout_s"])  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["schema", "name", "model", "handoff", "router", "hosts", "replicas"]),
        VALUES | st.dictionaries(KEYS, VALUES) | st.lists(st.dictionaries(KEYS, VALUES)),
    )
)
def test_no_value_makes_the_reader_raise(document: dict[str, object]) -> None:
    """Every kind of value in every place is read or reported."""
    from pdctl.topology.load import _Reading, judge

    topology, found = judge(_Reading().document(document))
    assert topology is not None or found
