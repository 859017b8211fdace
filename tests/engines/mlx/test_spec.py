"""MLX's control side: commands, options and bodies as exact values."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import msgspec
import pytest
from engines import specs
from engines.specs import LEG, LONG_ANSWER, ONE_TOKEN, plan_of, planned

from pdctl.engines.mlx.spec import MlxSpec
from pdctl.topology.model import Engine, Host, Replica, Role

SPEC = MlxSpec()
LEG_FIELDS = msgspec.to_builtins(LEG)

declared = partial(specs.declared, Engine.MLX)


def argv(replica: Replica, host: Host) -> tuple[str, ...]:
    plan = planned(replica)
    return SPEC.command(plan, host, plan_of(plan)).argv


def test_the_server_is_started_with_the_libraries_own_options() -> None:
    """R60: golden; on loopback, `_` becomes `-`, objects become JSON, defaults are explicit."""
    config = {"temp": 0.7, "decode_concurrency": 8, "chat_template_args": {"enable_thinking": 0}}
    host = Host(name="local", python="/venv/bin/python")
    assert argv(declared(engine_config=config), host) == (
        "/venv/bin/python",
        *("-m", "pdctl.engines.mlx.server"),
        *("--model", "/m/qwen"),
        *("--host", "127.0.0.1"),
        *("--port", "9100"),
        *("--chat-template-args", '{"enable_thinking": 0}'),
        *("--decode-concurrency", "8"),
        *("--prefill-step-size", "256"),
        *("--prompt-concurrency", "1"),
        *("--temp", "0.7"),
    )


def test_python_and_environment_of_a_replica_win_over_its_hosts() -> None:
    """Two engines on one host need two environments."""
    host = Host(name="local", python="/a/python", env={"A": "1", "B": "1"})
    replica = declared(python="/b/python", env={"B": "2"})
    command = SPEC.probe(replica, host)
    assert command.argv == ("/b/python", "-m", "pdctl.engines.mlx.probe", "/m/qwen")
    assert (command.env["A"], command.env["B"]) == ("1", "2")
    assert command.env["HF_HUB_OFFLINE"] == "1"


def test_every_problem_is_reported_and_devices_too() -> None:
    """All in one pass, in the file's order."""
    replica = declared(engine_config={"port": 1, "nope": 2}, devices=(0,))
    assert [d.field for d in SPEC.check(replica)] == [
        "engine_config.port",
        "engine_config.nope",
        "devices",
    ]


def test_prefill_copies_ask_for_one_token() -> None:
    """U23: max_completion_tokens is bounded too."""
    assert SPEC.prefill_body(LONG_ANSWER, LEG) == {**ONE_TOKEN, "pdctl": LEG_FIELDS}
    assert LONG_ANSWER["stream"] is True


def test_decode_copies_are_the_clients_own() -> None:
    """The decode engine formats what the user sees."""
    body = {"prompt": "x", "stream": True, "logprobs": True}
    assert SPEC.decode_body(body, LEG) == {**body, "pdctl": LEG_FIELDS}
    assert SPEC.abort(7) == ("/pdctl/abort", {"room": 7})


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"draft_model": "x"}, "draft_model"),
        ({"adapters": "x"}, "adapters"),
        ({"echo": True}, "echo"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ],
)
def test_what_mlx_cannot_honour_is_refused_by_parameter(
    body: dict[str, object], parameter: str
) -> None:
    """R66: before anything is scheduled."""
    assert [name for name, _ in SPEC.refusals(body, Role.DECODE)] == [parameter]


def test_what_mlx_honours_is_not_refused() -> None:
    """R65: response_format text; and a seed, tools, logprobs and stop strings."""
    body = {
        "response_format": {"type": "text"},
        "seed": 3,
        "tools": [{"type": "function"}],
        "logprobs": 5,
        "echo": False,
        "tool_choice": "none",
        "stop": ["x"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }
    assert SPEC.refusals(body, Role.PREFILL) == []


def test_error_bodies_of_the_library_and_of_pdctl_are_understood() -> None:
    """Text and cause survive."""
    ours = b'{"error": {"message": "gone", "type": "server_error", "code": "peer_lost"}}'
    assert SPEC.error_message(502, ours) == ("gone", "peer_lost")
    assert SPEC.error_message(400, b'{"error": "top_p must be"}') == ("top_p must be", None)
    assert SPEC.error_message(404, b"Not Found") == ("Not Found", None)
    assert SPEC.error_message(500, b"") == ("HTTP 500 without a body", None)
    assert SPEC.error_message(500, b"[1]")[1] is None


def test_the_control_side_never_imports_the_engine() -> None:
    """The CLI, the agent and the router run where no engine is installed."""
    code = (
        "import sys; from pdctl.engines.registry import spec_for;"
        "from pdctl.topology.model import Engine; spec_for(Engine.MLX);"
        "sys.exit(any(m.split('.')[0] in ('mlx', 'mlx_lm', 'torch') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
