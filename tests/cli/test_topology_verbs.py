"""The verbs about topologies, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint
from topology.texts import GOOD, edited, native_apart, native_between

from pdctl import __version__
from pdctl.cli import app as boundary
from pdctl.cli.app import main
from pdctl.cli.plan import surroundings
from pdctl.cli.verbs import VERBS, Verb
from pdctl.errors import ContractError
from pdctl.topology.load import loads
from pdctl.topology.plan import derive

ROOT = Path(__file__).parents[2]


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def pdctl(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    """Runs one command line in this process, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(a) for a in arguments])
        text = capsys.readouterr()
        code = caught.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), *text)

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "topology.toml"
    path.write_text(GOOD)
    return path


MALFORMED: Sequence[tuple[str, str, str]] = [
    (
        "typo",
        edited("role", "rol"),
        'error: replica "p0": unknown key "rol"\n\nhint: did you mean "role"?\n',
    ),
    (
        "engine",
        edited('"mlx"', '"tgi"'),
        'error: replica "p0": engine is "tgi"\n\nhint: known values: vllm, sglang, mlx\n',
    ),
    (
        "a value's typo",
        edited('"decode"', '"decoder"'),
        'error: replica "d0": role is "decoder"\n\n'
        'hint: did you mean "decode"? known values: prefill, decode, both\n',
    ),
    (
        "duplicate",
        edited('"d0"', '"p0"'),
        'error: two replicas are named "p0" (replicas[0] and replicas[1])\n',
    ),
    (
        "no-prefill",
        edited('"prefill"', '"decode"'),
        'error: replica "p0": there is no prefill replica for its role decode\n',
    ),
    ("reserved", GOOD + "engine_config = { port = 80 }\n", 'error: replica "d0": '),
    (
        "size",
        edited("timeout_s = 30", 'buffer_bytes = "1GB"'),
        'error: handoff: buffer_bytes is not a size: "1GB" has an unknown unit\n',
    ),
    (
        "clash",
        edited('name = "d0"', 'name = "d0"\nhttp_port = 8000'),
        'error: port 8000 on host "local" is claimed by replica "d0" http_port and by the router\n',
    ),
    (
        "host",
        edited('name = "d0"', 'name = "d0"\nhost = "mac"'),
        'error: replica "d0": there is no host "mac"\n\nhint: add a table [hosts.mac]\n',
    ),
    ("empty", "", "is empty\n\nhint: `pdctl init` writes a starter topology\n"),
]


@pytest.mark.parametrize(("name", "text", "words"), MALFORMED, ids=[m[0] for m in MALFORMED])
def test_a_malformed_topology_is_named(
    name: str, text: str, words: str, pdctl: Any, file: Path
) -> None:
    """R52: exit 2 and one sentence with a hint, from the file alone."""
    file.write_text(text)
    done = pdctl("validate", file, "--offline")
    assert done.code == 2
    assert words in done.err
    assert done.out == ""
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (("plan",), "missing argument 'TOPOLOGY'", "pdctl plan --help"),
        (("validate", "x", "--ofline"), "no such option: --ofline", "pdctl validate --help"),
        (("launch",), "no such command 'launch'", "pdctl --help"),
    ],
)
def test_a_command_line_that_can_not_be_is_an_error_as_any_other(
    words: tuple[str, ...], sentence: str, hint: str, pdctl: Any
) -> None:
    """Exit 2, a sentence and a hint, without boxes."""
    done = pdctl(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {sentence}")
    assert done.err.endswith(f"\n\nhint: {hint}\n")


def test_no_command_at_all_shows_the_commands(pdctl: Any) -> None:
    """And exit 2: nothing was done."""
    done = pdctl()
    assert done.code == 2
    assert "Usage: pdctl" in done.out
    assert "validate" in done.out


def test_plan_names_all_that_use_a_store_and_leaves_homes_to_the_shell(
    pdctl: Any, file: Path
) -> None:
    """A command that is pasted runs: a tilde in quotes would be a folder of that name."""
    sharing = (ROOT / "examples" / "topologies" / "sharing.toml").read_text()
    studio = '[[replicas]]\nhost = "studio"\nengine = "mlx"\nmodel = "~/m m"\n'
    more = studio + 'name = "{}"\nrole = "{}"\n'
    file.write_text(sharing + more.format("p0", "prefill") + more.format("d0", "decode"))
    done = pdctl("plan", file, "--offline")
    assert done.code == 0, done.err
    assert "page store of gpu1: 2.0 GiB of memory, for v0," in done.out
    assert "page store of studio: 2.0 GiB of memory, for m0, p0, d0," in done.out
    assert "~/venvs/mlx/bin/python -m pdctl.engines.mlx.server --model ~/'m m' " in done.out


def test_missing_files_are_named(pdctl: Any, file: Path, tmp_path: Path) -> None:
    """Exit 2 for a topology that is not there, and for a model directory that is not there."""
    done = pdctl("validate", tmp_path / "none.toml")
    assert done.code == 2
    assert "none.toml" in done.err
    done = pdctl("validate", file)
    assert done.code == 2
    assert 'error: replica "p0": there is no directory /models/tiny' in done.err


def test_a_key_that_is_not_set_matters_to_a_launch_alone(pdctl: Any, file: Path) -> None:
    """A warning where the file alone is checked, else an error."""
    file.write_text(edited("[router]", '[router]\napi_key_env = "ABSENT_KEY"'))
    words = "router: the environment variable ABSENT_KEY is not set"
    for verb in ("validate", "plan"):
        done = pdctl(verb, file, "--offline")
        assert (done.code, f"warning: {words}" in done.err) == (0, True)
    done = pdctl("validate", file)
    assert (done.code, f"error: {words}" in done.err) == (2, True)


def test_all_problems_come_in_one_pass(pdctl: Any, file: Path) -> None:
    """Nine faults in one file: nine errors in one report, in Terraform's shape."""
    text = GOOD.replace("[router]", "[router]\nbnd = 1\npolicy = 3")
    text = text.replace("timeout_s = 30", 'timeout_s = nan\nbuffer_bytes = "1GB"')
    text = text.replace('engine = "mlx"', 'engine = "tgi"', 1)
    text = text.replace('name = "d0"', 'name = "p0"\nhost = "mac"\nhttp_port = 8000')
    text = text.replace('role = "decode"', 'role = "decoder"')
    file.write_text(text + "engine_config = { port = 1 }\n")
    done = pdctl("validate", file, "--offline", "--json")
    report = json.loads(done.out)
    assert done.code == 2
    assert report["valid"] is False
    assert report["format_version"] == "1.0"
    assert report["error_count"] == len(report["diagnostics"]) == 9
    assert set(report["diagnostics"][0]) == {
        "severity", "code", "summary", "detail", "replica", "field", "hint"
    }  # fmt: skip
    assert {d["field"] for d in report["diagnostics"]} >= {
        "router.bnd", "router.policy", "handoff.timeout_s", "handoff.buffer_bytes",
        "replicas[0].engine", "replicas[1].name", "replicas[1].host", "replicas[1].role",
    }  # fmt: skip


def test_a_valid_file_says_so(pdctl: Any, file: Path) -> None:
    done = pdctl("validate", file, "--offline")
    assert (done.code, done.out) == (0, f"{file} is valid: 2 replicas, 1 pair\n")


def test_plan_shows_commands_ports_and_pairs(pdctl: Any, file: Path) -> None:
    """The exact argv per replica, as text and as JSON."""
    done = pdctl("plan", file, "--offline")
    assert done.code == 0
    assert "pair p0>d0  tcp  (auto → tcp: mlx has no GPU path)" in done.out
    assert "-m pdctl.engines.mlx.server --model /models/tiny" in done.out
    document = json.loads(pdctl("plan", file, "--offline", "--json").out)
    replicas = document["plan"]["replicas"]
    for replica in replicas:
        argv = document["commands"][replica["name"]]["argv"]
        assert argv[argv.index("--port") + 1] == str(replica["http_port"])


def test_plan_of_a_native_pair_shows_its_side_ports_and_what_is_open(
    pdctl: Any, file: Path
) -> None:
    """R60, U30: on loopback, no warning; at an address, one for each end."""
    file.write_text(native_between("vllm", "vllm"))
    near = pdctl("plan", file, "--offline")
    assert near.code == 0
    assert "pair p0>d0  native  (native: vLLM's own NixlConnector)" in near.out
    assert near.out.count("(its engine's own)") == 2
    assert "page budget" not in near.out
    assert "lets whoever reaches it" not in near.err
    file.write_text(native_apart("vllm"))
    apart = pdctl("plan", file, "--offline")
    assert apart.code == 0
    assert apart.err.replace("\n", " ").count("lets whoever reaches it") == 2
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2" in apart.out


def test_plan_shows_the_way_to_other_hosts(
    pdctl: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper's ssh with its forwards, each agent and its state, and what is lost with this
    machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(file.parent / "state"))
    far = '[hosts.studio]\nssh = "me@studio"\npython = "~/mlx/bin/python"\n'
    text = GOOD.replace('name = "d0"', 'name = "d0"\nhost = "studio"') + far
    file.write_text(text + '[hosts.local]\naddress = "192.0.2.7"\n')
    done = pdctl("plan", file, "--offline")
    assert done.code == 0, done.err
    assert "on studio, by ssh me@studio" in done.out
    assert "while it is off, nothing is served" in done.out
    around = json.loads(pdctl("plan", file, "--offline", "--json").out)["surroundings"]
    assert set(around) == {"agent of local", "agent of studio", "local to studio", "router"}
    assert around["agent of studio"][:3] == [
        "~/mlx/bin/python", "-m", "pdctl.runtime.agent.watchdog"
    ]  # fmt: skip
    state = around["agent of local"].index("--state") + 1
    assert around["agent of local"][state] == str(file.parent / "state" / "pdctl" / "studio")
    told = around["agent of studio"]
    assert told[told.index("--state") + 1] == "~/.local/state/pdctl/studio/hosts/studio"
    topology, _ = loads(file.read_text())
    assert topology is not None
    told = surroundings(topology, derive(topology), {"studio": "/scratch/me/pdctl"})[
        "agent of studio"
    ]
    assert told[told.index("--state") + 1] == "/scratch/me/pdctl/studio/hosts/studio"
    argv = around["local to studio"]
    forward = argv[argv.index("-L") + 1].split(":")
    assert (forward[0], forward[2], len(forward)) == ("127.0.0.1", "127.0.0.1", 4)
    assert "me@studio" in argv


def test_a_plan_of_a_broken_file_fails(pdctl: Any, file: Path) -> None:
    file.write_text(edited("role", "rol"))
    done = pdctl("plan", file, "--offline")
    assert done.code == 2
    assert "unknown key" in done.err
    assert done.out == ""


def test_fingerprint_prints_every_field(pdctl: Any, tmp_path: Path) -> None:
    """Fields and digest; dtype and context length can be chosen, and change the digest."""
    model = make_checkpoint(tmp_path / "tiny", "qwen3")
    done = pdctl("fingerprint", model)
    assert done.code == 0
    names = [line.split()[0] for line in done.out.splitlines()]
    assert names == ["weights", "tokenizer", "chat_template", "attention", "positions", "dtype",
                     "page_tokens", "protocol", "digest"]  # fmt: skip
    document = json.loads(pdctl("fingerprint", model, "--json").out)
    assert document["contract"]["dtype"] == "float16"
    assert document["token_kv_bytes"] == 4 * 2 * 2 * 64 * 2
    other = json.loads(pdctl("fingerprint", model, "--json", "--context-length", 64).out)
    assert other["digest"] != document["digest"]
    assert other["contract"]["weights"] == document["contract"]["weights"]
    assert pdctl("fingerprint", model, "--context-length", 99999).code == 2
    assert pdctl("fingerprint", tmp_path / "absent").code == 2


def test_init_writes_a_valid_starter_and_replaces_nothing(pdctl: Any, tmp_path: Path) -> None:
    """An existing file stays unless --force is given; an unknown starter is named."""
    path = tmp_path / "new.toml"
    assert pdctl("init", path).code == 0
    assert pdctl("validate", path, "--offline").code == 0
    path.write_text("mine")
    done = pdctl("init", path)
    assert done.code == 2
    assert done.err == f"error: {path} exists already\n\nhint: --force replaces it\n"
    assert path.read_text() == "mine"
    assert pdctl("init", path, "--force").code == 0
    assert path.read_text() != "mine"
    assert pdctl("init", tmp_path / "x.toml", "--from", "tpu").code == 2


def test_a_mistyped_verb_names_the_nearest(pdctl: Any) -> None:
    done = pdctl("validat")
    assert done.code == 2
    assert "validate" in done.err


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_fault(file: Path, redirect: str) -> None:
    """The exit code is the same as with a terminal."""
    words = f"exec {sys.executable} -m pdctl.cli.app validate --offline {file} {redirect}"
    done = subprocess.run(
        ["sh", "-c", words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_an_error_and_a_hint(file: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "pdctl.cli.app", "validate", "--offline", str(file)]
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no space is left to write to\n\nhint: ")
    assert "Exception" not in done.stderr


def test_the_version_is_shown(pdctl: Any) -> None:
    assert pdctl("--version").out == f"pdctl {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ContractError("they differ", hint="copy it"), 3, "error: they differ\n\nhint: copy it\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("by zero"), 1, "error: unexpected ZeroDivisionError: by zero\n"),
    ],
)
def test_the_boundary_turns_errors_into_codes(
    error: BaseException, code: int, words: str, pdctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place knows exit codes; nobody sees a traceback unasked."""

    def fail() -> None:
        raise error

    verb = Verb("fail", "pdctl.cli.fail:fail", "Fails.")
    monkeypatch.setattr(Verb, "load", lambda self: fail)
    monkeypatch.setattr(boundary, "VERBS", {"fail": verb})
    done = pdctl("fail")
    assert done.code == code
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_traceback_comes_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Verb, "load", lambda self: fail)
    monkeypatch.setenv("PDCTL_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


def test_every_verb_loads_and_has_help() -> None:
    """The table's targets exist, and each function's docstring is its help."""
    for verb in VERBS.values():
        assert verb.load().__doc__, verb.name


def test_the_help_imports_neither_engines_nor_actors() -> None:
    """`pdctl --help` is quick: no engine, actor library, pandas, numpy or server is imported."""
    script = (
        "import sys\nfrom pdctl.cli.app import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'mlx', 'mlx_lm', 'torch', 'vllm', 'sglang', 'xoscar', 'pandas', 'scipy',"
        " 'numpy', 'aiohttp', 'transformers'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "HEAVY []" in done.stderr
    for name in VERBS:
        assert name in done.stdout
