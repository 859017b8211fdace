"""Validation on this machine, with the engine's probe played by a fake host."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ports import free_port
from safetensors.numpy import load_file, save_file
from tiny import make_checkpoint

from pdctl import __version__
from pdctl.engines.interface import Command, Probe
from pdctl.errors import HostError
from pdctl.runtime.checks.outcome import Validation
from pdctl.runtime.checks.validation import validate
from pdctl.runtime.hosts.interface import Completed, RuntimeHost
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.local_survey import LocalSurvey
from pdctl.topology.checkpoint import read_checkpoint
from pdctl.topology.digests import DigestCache
from pdctl.topology.model import Host


class FakeHost(LocalHost):
    """This machine, but `run` answers probes itself: as a right engine would, unless changed."""

    ran: list[Command]

    def __init__(
        self, change: Callable[[Probe], Probe | Completed | Exception], cache: DigestCache
    ) -> None:
        super().__init__("local")
        self.survey = LocalSurvey("local", cache=cache)
        self.ran = []
        self.change = change

    def run(self, command: Command, *, stdin: bytes = b"", timeout_s: float) -> Completed:
        self.ran.append(command)
        checkpoint, _ = read_checkpoint(Path(command.argv[-1]))
        assert checkpoint is not None
        probe = Probe(
            engine_version="0.32.2",
            pdctl_version=__version__,
            python_version="3.11.9",
            effective={
                "attention": msgspec.to_builtins(checkpoint.attention),
                "positions": {
                    "rope_theta": checkpoint.rope_theta,
                    "scaling": None,
                    "max_positions": checkpoint.max_positions,
                },
            },
        )
        answer = self.change(probe)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Completed):
            return answer
        return Completed(returncode=0, stdout=msgspec.json.encode(answer), stderr=b"")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def topology(prefill: Path, decode: Path, *, port: int | None = None, extra: str = "") -> str:
    return f"""
schema = 1
name = "checked"
[model]
name = "tiny"
context_length = 2048
[router]
bind = "127.0.0.1:{port or free_port()}"
[[replicas]]
name = "p0"
engine = "mlx"
role = "prefill"
model = "{prefill}"
[[replicas]]
name = "d0"
engine = "mlx"
role = "decode"
model = "{decode}"
{extra}"""


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Validation]:
    def run(
        text: str, change: Callable[[Probe], Any] = lambda probe: probe, **options: Any
    ) -> Validation:
        file = tmp_path / "topology.toml"
        file.write_text(text)
        host = FakeHost(change, DigestCache(tmp_path / "cache"))

        def reach(_: Mapping[str, Host]) -> AbstractContextManager[Mapping[str, RuntimeHost]]:
            return nullcontext({"local": host})

        found = validate(file, reach=reach, environ={}, **options)
        run.host = host  # type: ignore[attr-defined]
        return found

    return run


Check = Callable[..., Validation]


def codes(found: Validation) -> list[str]:
    return [d.code for d in found.report.diagnostics]


def test_a_good_topology_gives_plan_and_contract(original: Path, check: Check) -> None:
    """Equal probes run once; the plan carries the contract's digest and page size."""
    found = check(topology(original, original))
    assert found.report.valid, found.report
    assert found.plan is not None
    assert found.contract is not None
    assert found.plan.contract_digest == found.contract.digest
    assert found.plan.page_bytes == found.contract.page_bytes == 4 * 2 * 2 * 64 * 64 * 2
    assert set(found.models) == {"p0", "d0"}
    assert len(check.host.ran) == 1  # type: ignore[attr-defined]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_a_byte(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].view(np.uint8)[0] ^= 1
    save_file(tensors, folder / "model.safetensors")


def to_bfloat16(folder: Path) -> None:
    """Rewrites the header only: the same bytes, called BF16."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'"F16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (flip_a_byte, "contract.weights", "tensor model.norm.weight"),
        (to_bfloat16, "contract.dtype", "bfloat16"),
        (
            lambda f: (f / "tokenizer.json").write_text(
                (f / "tokenizer.json").read_text().replace("<|im_end|>", "<|im_fin|>")
            ),
            "contract.tokenizer",
            "tokenizer.json",
        ),
        (
            lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"),
            "contract.chat_template",
            "chat_template.jinja",
        ),
        (lambda f: edit_config(f, rope_theta=5e5), "contract.positions", "rope_theta: 100000.0"),
        (
            lambda f: edit_config(f, max_position_embeddings=1024),
            "contract.positions",
            "max_positions: 8192 and 1024",
        ),
        (
            lambda f: edit_config(f, head_dim=32),
            "contract.attention",
            "head_dim: 64 and 32",
        ),
    ],
)
def test_a_mismatch_names_field_part_and_both_replicas(
    change: Callable[[Path], object],
    code: str,
    words: str,
    original: Path,
    copy: Path,
    check: Check,
) -> None:
    """R54: exit code 3, and a sentence that names the field, what in it, and the two replicas."""
    change(copy)
    found = check(topology(original, copy))
    named = [d for d in found.report.errors if d.code == code]
    assert named, found.report
    assert found.report.exit_code == 3
    assert words in named[0].summary
    assert '"p0"' in named[0].summary
    assert '"d0"' in named[0].summary
    assert found.plan is None


def test_a_context_beyond_every_checkpoint_is_a_fault_of_the_file(
    original: Path, check: Check
) -> None:
    found = check(topology(original, original).replace("2048", "9000"))
    assert codes(found) == ["topology.context_length"]
    assert found.report.exit_code == 2


def test_effective_values_count(original: Path, check: Check) -> None:
    """The rope_theta trap: an engine that reads another value is refused by field, once, and
    what its probe says about it is the detail."""

    def misread(probe: Probe) -> Probe:
        assert probe.effective is not None
        positions = {**probe.effective["positions"], "rope_theta": 10000.0}
        return msgspec.structs.replace(
            probe,
            effective={**probe.effective, "positions": positions},
            problems=("rope_theta is read at the top level only", "something else"),
        )

    found = check(topology(original, original), misread)
    assert [d.code for d in found.report.errors] == [
        "contract.positions",
        "host.unsupported",
        "contract.positions",
        "host.unsupported",
    ]
    first = found.report.errors[0]
    assert first.summary == (
        'replica "p0": mlx reads rope_theta as 10000.0, config.json means 100000.0'
    )
    assert first.detail == "rope_theta is read at the top level only"
    assert found.report.exit_code == 3


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (
            Completed(returncode=1, stdout=b"", stderr=b"x\nNo module named 'mlx_lm'\n"),
            "host.probe",
            "No module named 'mlx_lm'",
        ),
        (Completed(returncode=0, stdout=b"garbage", stderr=b""), "host.probe", "exit status 0"),
        (HostError("host: can't run python9"), "host.python", "can't run python9"),
        ({"engine_version": "0.30.9"}, "host.engine_version", "0.30.9 is not supported"),
        ({"engine_version": "0.33.0"}, "host.engine_version", "0.33.0 is not supported"),
        ({"pdctl_version": "9.9"}, "host.pdctl_version", "pdctl 9.9"),
    ],
)
def test_an_unfit_environment_is_named(
    answer: Any, code: str, words: str, original: Path, check: Check
) -> None:
    """Exit code 4: the interpreter, the engine or its version is not what is needed."""

    def change(probe: Probe) -> Any:
        return msgspec.structs.replace(probe, **answer) if isinstance(answer, dict) else answer

    found = check(topology(original, original), change)
    assert set(codes(found)) == {code}
    assert words in found.report.errors[0].summary
    assert found.report.exit_code == 4


def test_a_busy_port_is_named_with_its_owner(original: Path, check: Check) -> None:
    """U25: the router's port is taken, and the message says by which process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check(topology(original, original, port=port))
    assert codes(found) == ["host.port_busy"]
    assert f"router: port {port} is in use by " in found.report.errors[0].summary
    assert "(pid " in found.report.errors[0].summary
    assert found.report.exit_code == 4


def test_an_address_of_another_machine_is_refused(original: Path, check: Check) -> None:
    """R59: a data address that this machine does not have can't be listened on."""
    text = topology(original, original).replace('name = "p0"', 'name = "p0"\naddress = "192.0.2.1"')
    found = check(text)
    assert codes(found) == ["host.address"]
    assert "192.0.2.1 is no address of its host" in found.report.errors[0].summary


def test_a_missing_model_directory_is_a_fault_of_the_file(original: Path, check: Check) -> None:
    """Exit code 2, and the other replica is still checked."""
    found = check(topology(original, original / "absent"))
    assert codes(found) == ["topology.model_missing"]
    assert found.report.errors[0].replica == "d0"
    assert found.report.exit_code == 2


HERE = '[[replicas]]\nhost = "nowhere"'


def test_a_broken_file_starts_nothing(original: Path, copy: Path, check: Check) -> None:
    """R52: no probe runs, no weight is read; directories are still looked at."""
    found = check(topology(original, copy / "absent").replace("[router]", "[router]\nbnd = 1"))
    assert codes(found) == ["topology.unknown_key", "topology.model_missing"]
    assert check.host.ran == []  # type: ignore[attr-defined]


def test_a_replica_on_a_host_that_is_not_there_is_named(original: Path, check: Check) -> None:
    """The other replica's directory is looked at all the same."""
    text = topology(original, original / "absent").replace("[[replicas]]", HERE, 1)
    found = check(text)
    assert codes(found) == ["topology.unknown_host", "topology.model_missing"]
    assert found.report.exit_code == 2
    found = check(text.replace('name = "p0"', 'name = "d0"'))
    assert set(codes(found)) >= {"topology.unknown_host", "topology.duplicate_name"}


def test_offline_touches_nothing(check: Check, tmp_path: Path) -> None:
    """--offline: a model that does not exist and a taken port are not looked at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check(topology(tmp_path / "a", tmp_path / "b", port=port), offline=True)
    assert found.report.valid
    assert found.plan is not None
    assert found.plan.contract_digest is None
    assert check.host.ran == []  # type: ignore[attr-defined]


def test_reserved_engine_options_are_refused_with_their_place(original: Path, check: Check) -> None:
    """R51: what pdctl owns is refused in engine_config, by name."""
    found = check(topology(original, original, extra="engine_config = { port = 8080 }"))
    assert [d.code.partition(".")[0] for d in found.report.errors] == ["topology"]
    assert "port" in found.report.errors[0].summary
    assert (found.report.errors[0].field or "").startswith("replicas[1].")


@pytest.mark.parametrize("shares", [True, False])
def test_what_leaves_nothing_to_share_is_refused_where_prefixes_are_shared(
    check: Check, tmp_path: Path, shares: bool
) -> None:
    """R51, R52: by name, with its place, before anything is launched."""
    ordinary = "".join(
        f'''
[[replicas]]
name = "o{n}"
engine = "sglang"
model = "{tmp_path}"
role = "both"
engine_config = {{ disable-radix-cache = {str(n > 0).lower()} }}'''
        for n in range(2)
    )
    text = topology(tmp_path, tmp_path, extra=ordinary + ("\n[sharing]" if shares else ""))
    found = check(text, offline=True)
    refused = [(d.code, d.field) for d in found.report.errors]
    place = "replicas[3].engine_config.disable-radix-cache"
    assert refused == ([("topology.engine_config.sharing", place)] if shares else [])


def test_too_little_memory_is_a_warning(
    original: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate refuses nothing."""
    from types import SimpleNamespace

    from pdctl.runtime.hosts import facts

    monkeypatch.setattr(facts.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    found = check(topology(original, original))
    assert codes(found) == ["host.memory"]
    assert found.report.valid
    assert found.plan is not None
