"""The command line of OpenSSH's client for one host, and what its failures mean. Runs nothing."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import msgspec

from pdctl import __version__
from pdctl.errors import HostError
from pdctl.runtime.hosts.installing import install
from pdctl.topology.model import Host

CONNECT_TIMEOUT_S = 10

ENVIRONMENT = {"LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}
"""Added to ssh's: nothing asks, and its messages are in one language."""


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """A port on loopback here that leads to a port on loopback there."""

    local_port: int
    remote_port: int


def ssh_argv(
    host: Host,
    *,
    forwards: tuple[Forward, ...] = (),
    remote: tuple[str, ...],
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
) -> tuple[str, ...]:
    """Runs `remote` (words of a remote shell, quoted already) on `host`.

    Everything that is not said here is left to the user's configuration. A user's own master is
    used, but for forwards: those end with the connection that they were made for.

    Raises:
        HostError: its destination can't be one.
    """
    options = [
        "BatchMode=yes",
        f"ConnectTimeout={connect_timeout_s}",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
        "LogLevel=INFO",
        "RemoteCommand=none",
        "ControlMaster=no",
    ]
    if forwards:
        options += ["ControlPath=none", "ExitOnForwardFailure=yes"]
    else:
        options += ["ClearAllForwardings=yes"]
    argv = ["ssh", "-T"]
    for option in options:
        argv += ["-o", option]
    for forward in forwards:
        argv += ["-L", f"127.0.0.1:{forward.local_port}:127.0.0.1:{forward.remote_port}"]
    return (*argv, *_destination(host), "--", *remote)


def remote_python(host: Host) -> str:
    """The interpreter that answers there, as a word of any remote shell."""
    python = _python(host)
    if python.startswith("~/"):
        return f'"$HOME"/{shlex.quote(python[2:])}'
    return shlex.quote(python)


def far_end_argv(
    host: Host,
    *,
    forwards: tuple[Forward, ...] = (),
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
) -> tuple[str, ...]:
    """The far end of `host`, over ssh."""
    remote = (remote_python(host), "-m", "pdctl.runtime.hosts.far_end", shlex.quote(host.name))
    return ssh_argv(host, forwards=forwards, remote=remote, connect_timeout_s=connect_timeout_s)


def _destination(host: Host) -> tuple[str, ...]:
    destination = host.ssh or ""
    if not destination or destination.startswith("-"):
        raise HostError(
            f'host "{host.name}": "{destination}" is no SSH destination',
            hint='ssh = "user@machine", "ssh://user@machine:port", or a name of ~/.ssh/config',
        )
    if not destination.startswith("ssh://"):
        return (destination,)
    try:
        parts = urlsplit(destination)
        port = parts.port
    except ValueError:
        parts, port = urlsplit("ssh://"), None
    user = unquote(parts.username or "")
    if not parts.hostname or parts.hostname.startswith("-") or user.startswith("-"):
        raise HostError(
            f'host "{host.name}": "{destination}" is no SSH destination',
            hint='it is written "ssh://user@machine:port", or "ssh://user@[IPv6]:port"',
        )
    # urlsplit lowers a name's case, which names in ~/.ssh/config may depend on.
    at = destination.lower().rindex(parts.hostname)
    name = destination[at : at + len(parts.hostname)]
    return (
        *(("-l", user) if user else ()),
        *(("-p", str(port)) if port is not None else ()),
        name,
    )


def not_started(host: Host, error: OSError) -> HostError:
    """ssh itself can't be run here."""
    return HostError(
        f'host "{host.name}": can\'t run ssh on this machine: {error.strerror}',
        hint="install the OpenSSH client",
    )


def explain(
    host: Host,
    returncode: int | None,
    stderr: str,
    *,
    noise: str = "",
    wrong: str = "nothing answered in time",
) -> HostError:
    """Why there is no far end. What was printed decides nothing but the hint.

    Args:
        returncode: None: it still ran, and had to be ended.
        noise: what came at stdout instead of a far end's first word.
        wrong: why it had to be ended.
    """
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {said[-1].removeprefix('ssh: ')}" if said else ""
    python = _python(host)
    if returncode is None:
        sentence = f"ssh {host.ssh}: {wrong}{last}"
    elif returncode == 255:
        sentence = f"ssh {host.ssh} failed{last}"
    elif returncode in (126, 127):
        sentence = f"can't run {python} there{last}"
    else:
        sentence = f"{python} there ended with exit code {returncode}{last}"
    if not said and noise.strip():
        sentence += f" (it printed {noise.strip().splitlines()[-1][:80]!r})"
    return HostError(f'host "{host.name}": {sentence}', hint=_hint(host, returncode, stderr))


def other_version(host: Host, version: str) -> HostError:
    python = _python(host)
    return HostError(
        f'host "{host.name}": {python} there has pdctl {version}, this is {__version__}',
        hint=f"the same version on both: {install(python, host=host.name)}",
    )


def _hint(host: Host, returncode: int | None, stderr: str) -> str:
    if returncode in (126, 127):
        return f"`agent_python` or `python` of hosts.{host.name} names the interpreter there"
    for words, hint in _HINTS:
        for line in stderr.splitlines():
            if words in line:
                return hint(host, line.strip())
    word = "true" if returncode in (None, 255) else f"{_python(host)} --version"
    return f"try it by hand: {by_hand(host)} {word}"


def by_hand(host: Host) -> str:
    """`ssh gpu1`, as one types it; raises as `ssh_argv`."""
    return shlex.join(("ssh", *_destination(host)))


def _python(host: Host) -> str:
    return host.agent_python or host.python or "python3"


_HINTS: tuple[tuple[str, Callable[[Host, str], str]], ...] = (
    (
        "IDENTIFICATION HAS CHANGED",
        lambda host, _: (
            "if that machine was set up anew, remove its old key with `ssh-keygen -R`, then "
            f"`{by_hand(host)}` once by hand; else somebody may be in between"
        ),
    ),
    (
        "Host key verification failed",
        lambda host, _: f"connect once by hand and compare its key: {by_hand(host)}",
    ),
    (
        "Permission denied",
        lambda host, _: (
            "its user needs your public key (ssh-copy-id), your agent the private one (ssh-add); "
            f"try: {by_hand(host)} true"
        ),
    ),
    (
        "Connection refused",
        lambda host, _: (
            "no sshd listens there: start it, or correct address and port "
            f"({shlex.join(('ssh', '-G', *_destination(host)))} shows them)"
        ),
    ),
    (
        "No route to host",
        lambda host, _: f"it may be asleep, off, or on another network; try: {by_hand(host)} true",
    ),
    (
        "timed out",
        lambda host, _: f"it may be asleep, off, or behind a firewall; try: {by_hand(host)} true",
    ),
    (
        "Could not resolve",
        lambda host, _: f"check the name, or describe it in ~/.ssh/config: {host.ssh}",
    ),
    (
        "Address already in use",
        lambda _, line: f"another process of this machine has that port ({line})",
    ),
    (
        "No module named",
        lambda host, _: install(_python(host), host=host.name),
    ),
)
