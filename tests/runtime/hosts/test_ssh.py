from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pdctl import __version__
from pdctl.errors import HostError
from pdctl.runtime.hosts.ssh import (
    Forward,
    explain,
    far_end_argv,
    not_started,
    other_version,
    remote_python,
    ssh_argv,
)
from pdctl.topology.model import Host

OPTIONS = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 "
    "-o ServerAliveCountMax=3 -o LogLevel=INFO -o RemoteCommand=none -o ControlMaster=no"
)


def test_a_far_end_is_one_command_line() -> None:
    """Nothing of the user's configuration is overridden but what could ask, wait or share."""
    argv = far_end_argv(Host(name="gpu1", ssh="gpu1", python="/v/bin/python"))
    assert " ".join(argv) == (
        f"{OPTIONS} -o ClearAllForwardings=yes gpu1 -- "
        "/v/bin/python -m pdctl.runtime.hosts.far_end gpu1"
    )


def test_forwards_belong_to_a_connection_of_their_own() -> None:
    """With forwards no master is used, and one that can't be made is a failure."""
    argv = far_end_argv(
        Host(name="gpu1", ssh="me@box"),
        forwards=(
            Forward(local_port=41000, remote_port=8001),
            Forward(local_port=41001, remote_port=8002),
        ),
        connect_timeout_s=3,
    )
    assert " ".join(argv) == (
        f"{OPTIONS.replace('=10', '=3')} -o ControlPath=none -o ExitOnForwardFailure=yes "
        "-L 127.0.0.1:41000:127.0.0.1:8001 -L 127.0.0.1:41001:127.0.0.1:8002 "
        "me@box -- python3 -m pdctl.runtime.hosts.far_end gpu1"
    )


@pytest.mark.parametrize(
    ("destination", "words"),
    [
        ("gpu1", "gpu1"),
        ("me@gpu1.example", "me@gpu1.example"),
        ("ssh://Box", "Box"),
        ("ssh://me@Box.example:2222", "-l me -p 2222 Box.example"),
        ("ssh://me@[fe80::1]:2222", "-l me -p 2222 fe80::1"),
        ("ssh://[::1]", "::1"),
        ("ssh://box@box:22/", "-l box -p 22 box"),
    ],
)
def test_destinations_become_what_openssh_takes(destination: str, words: str) -> None:
    """OpenSSH refuses ssh:// with an IPv6 address in brackets, so every URL is split."""
    argv = ssh_argv(Host(name="h", ssh=destination), remote=("true",))
    assert " ".join(argv).removeprefix(f"{OPTIONS} -o ClearAllForwardings=yes ") == (
        f"{words} -- true"
    )


@pytest.mark.parametrize(
    "destination",
    ["-oProxyCommand=x", "", "ssh://-oProxyCommand=x", "ssh://-l@box", "ssh://", "ssh://box:x"],
)
def test_a_destination_that_is_an_option_is_refused(destination: str) -> None:
    """Nothing from a file becomes an option of ssh."""
    with pytest.raises(HostError, match=r'host "h": .* is no SSH destination'):
        ssh_argv(Host(name="h", ssh=destination), remote=("true",))


@pytest.mark.parametrize(
    ("python", "word"),
    [
        (None, "python3"),
        ("~/venvs/mlx/bin/python", '"$HOME"/venvs/mlx/bin/python'),
        ("~/my venv/bin/python", "\"$HOME\"/'my venv/bin/python'"),
        ("/opt/$(reboot)/python", "'/opt/$(reboot)/python'"),
    ],
)
def test_the_interpreter_is_one_word_of_any_shell(python: str | None, word: str) -> None:
    """A leading ~/ is the home there; everything else is quoted."""
    assert remote_python(Host(name="h", ssh="h", python=python)) == word


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "csh", "tcsh"])
def test_shells_agree_on_that_word(shell: str, tmp_path: Path) -> None:
    """Each shell that is here runs the interpreter in a home with a space in its name."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    home = tmp_path / "a home"
    home.mkdir()
    program = home / "it's python"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    word = remote_python(Host(name="h", ssh="h", python=f"~/{program.name}"))
    done = subprocess.run(
        [shell, "-c", word], env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert done.stdout == b"ran\n"


def test_the_agents_own_interpreter_comes_first() -> None:
    """`agent_python` before `python`."""
    assert remote_python(Host(name="h", ssh="h", python="/a", agent_python="/b")) == "/b"


HOST = Host(name="gpu1", ssh="me@box", python="/v/python")


@pytest.mark.parametrize(
    ("code", "stderr", "sentence", "hint"),
    [
        (
            255,
            "No ED25519 host key is known for box\nHost key verification failed.\n",
            'host "gpu1": ssh me@box failed: Host key verification failed.',
            "connect once by hand and compare its key: ssh me@box",
        ),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            'host "gpu1": ssh me@box failed: Host key verification failed.',
            "ssh-keygen -R",
        ),
        (255, "me@box: Permission denied (publickey).", "Permission denied", "ssh-add"),
        (255, "ssh: connect to host box port 22: Connection refused", "refused", "no sshd"),
        (255, "Connection timed out during banner exchange", "timed out", "asleep"),
        (255, "ssh: Could not resolve hostname box: x", "resolve", "~/.ssh/config"),
        (
            255,
            "bind [127.0.0.1]:41000: Address already in use",
            "in use",
            "41000: Address already in use)",
        ),
        (255, "words that nobody knows", "nobody knows", "try it by hand: ssh me@box true"),
        (255, "", "ssh me@box failed", "try it by hand"),
        (127, "sh: 1: /v/python: not found", "can't run /v/python there", "hosts.gpu1"),
        (126, "", "can't run /v/python there", "agent_python"),
        (
            1,
            "/v/python: No module named pdctl",
            "/v/python there ended with exit code 1: /v/python: No module named pdctl",
            "to gpu1, and there: /v/python -m pip install ./",
        ),
        (1, "Segmentation fault", "exit code 1", "ssh me@box /v/python --version"),
        (None, "", "ssh me@box: nothing answered in time", "try it by hand"),
    ],
)
def test_each_failure_is_a_sentence_and_a_hint(
    code: int | None, stderr: str, sentence: str, hint: str
) -> None:
    """The exit code decides the sentence; what was printed is quoted and chooses the hint."""
    error = explain(HOST, code, stderr)
    assert sentence in error.message
    assert error.message.startswith('host "gpu1": ')
    assert hint in (error.hint or "")
    assert error.exit_code == 4


def test_what_a_shell_printed_instead_is_shown() -> None:
    """Where ssh says nothing, the last line that came instead of a far end is quoted."""
    error = explain(HOST, 0, "", noise="This account is not available.\n")
    assert "This account is not available." in error.message


def test_no_ssh_here_and_another_version_there_are_named() -> None:
    """The two failures that ssh itself does not tell of."""
    assert "OpenSSH client" in (not_started(HOST, FileNotFoundError(2, "No such file")).hint or "")
    error = other_version(HOST, "9.9.9")
    assert "9.9.9" in error.message
    assert __version__ in error.message
    assert "and there: /v/python -m pip install ./" in (error.hint or "")
