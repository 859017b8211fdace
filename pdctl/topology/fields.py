"""One reader per kind of value in the file: takes what TOML gave, returns it typed.

A reader raises `Unacceptable` with the end of a sentence that starts with the field's name.
"""

from __future__ import annotations

import difflib
import enum
import ipaddress
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pdctl.topology.sizes import parse_size

E = TypeVar("E", bound=enum.StrEnum)

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_HOSTNAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?", re.ASCII)
_KINDS = {bool: "a boolean", int: "a whole number", float: "a number", str: "text",
          list: "a list", dict: "a table"}  # fmt: skip

_WRITTEN = {
    str: "write text in double quotes",
    int: "write a whole number as digits, without quotes",
    bool: "write true or false, without quotes",
    list: "write a list in square brackets",
    dict: "write a table as [name], or in braces",
}
"""Kind that is wanted → how TOML has it."""


class Unacceptable(Exception):
    """A value that its field can't take.

    Args:
        code: the diagnostic's code after `topology.`.
        reason: the rest of the sentence after the field's name.
        hint: what would be accepted.
    """

    def __init__(self, code: str, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.hint = hint


def kind_of(value: object) -> str:
    """The TOML kind of a value, in words."""
    return _KINDS.get(type(value), "a date or time")


def shown(value: object) -> str:
    """A value as an error message quotes it: short, and on one line."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= 60 else text[:57] + "…"


def _expect(value: object, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise Unacceptable("wrong_type", f"is {kind_of(value)}, not {what}", _WRITTEN.get(kind))
    return value


def text(value: object) -> str:
    """Any text that is not blank and holds no control characters."""
    found: str = _expect(value, str, "text")
    if not found.strip():
        raise Unacceptable("bad_value", "is empty")
    if not found.isprintable():
        raise Unacceptable("bad_value", f"holds control characters: {shown(found)}")
    return found


def name(value: object) -> str:
    """A cluster's, a host's or a replica's name."""
    found = text(value)
    if NAME.fullmatch(found) is None:
        raise Unacceptable(
            "bad_name",
            f"is {shown(found)}, which is not a name",
            "a name has at most 48 of a-z, 0-9 and -, and neither starts nor ends with -",
        )
    return found


def flag(value: object) -> bool:
    found: bool = _expect(value, bool, "true or false")
    return found


def count(value: object) -> int:
    """A whole number above zero."""
    found: int = _expect(value, int, "a whole number")
    if not 0 < found < 1 << 31:
        raise Unacceptable("bad_value", f"is {shown(found)}, which is not above 0 and below 2^31")
    return found


def schema(value: object) -> int:
    found: int = _expect(value, int, "a whole number")
    if found != 1:
        raise Unacceptable(
            "bad_schema", f"is {shown(found)}", "this version of pdctl reads schema = 1"
        )
    return found


def port(value: object) -> int:
    found: int = _expect(value, int, "a port number")
    if not 0 < found < 1 << 16:
        raise Unacceptable("bad_port", f"is {shown(found)}", "a port lies between 1 and 65535")
    return found


def size(value: object) -> int:
    """Bytes."""
    try:
        return parse_size(value)
    except ValueError as error:
        hint = 'write a size as "512MiB", with KiB, MiB or GiB, or as plain bytes'
        raise Unacceptable("bad_size", f"is not a size: {error}", hint) from None


def seconds(value: object) -> float:
    """A finite time above zero (R8)."""
    if type(value) not in (int, float):
        raise Unacceptable("wrong_type", f"is {kind_of(value)}, not a number of seconds")
    assert isinstance(value, int | float)
    if not 0 < value <= 1e9 or not math.isfinite(value):
        raise Unacceptable(
            "bad_timeout", f"is {shown(value)}", "a timeout is finite and above 0 seconds"
        )
    return float(value)


def choice(kind: type[E]) -> Callable[[object], E]:
    """A reader for one of an enumeration's values."""
    known = [member.value for member in kind]

    def read(value: object) -> E:
        found = text(value)
        if found not in known:
            code = f"unknown_{kind.__name__.lower()}" if kind.__name__ == "Engine" else "bad_value"
            near = difflib.get_close_matches(found.lower(), known, n=1, cutoff=0.6)
            meant = f'did you mean "{near[0]}"? ' if near else ""
            raise Unacceptable(
                code, f"is {shown(found)}", f"{meant}known values: {', '.join(known)}"
            )
        return kind(found)

    return read


def devices(value: object) -> tuple[int, ...]:
    found: list[object] = _expect(value, list, "a list of device numbers")
    if any(type(item) is not int or not 0 <= item < 1 << 16 for item in found):
        raise Unacceptable("bad_value", f"is {shown(found)}", "write devices = [0]")
    if len(set(found)) != len(found):
        raise Unacceptable("bad_value", f"names a device twice: {shown(found)}")
    return tuple(found)  # type: ignore[arg-type]


def table(value: object) -> dict[str, Any]:
    found: dict[str, Any] = _expect(value, dict, "a table")
    return found


def environment(value: object) -> dict[str, str]:
    """Environment variables: names and text."""
    found = table(value)
    for key, item in found.items():
        if _VARIABLE.fullmatch(key) is None:
            raise Unacceptable("bad_value", f"holds {shown(key)}, no environment variable's name")
        if type(item) is not str or "\0" in item:
            hint = f'write {key} = "{item}"' if type(item) in (int, float) else None
            raise Unacceptable("wrong_type", f"has {kind_of(item)} for {key}, not text", hint)
    return dict(found)


def variable(value: object) -> str:
    """The name of an environment variable."""
    found = text(value)
    if _VARIABLE.fullmatch(found) is None:
        raise Unacceptable(
            "bad_value",
            f"is {shown(found)}, no environment variable's name",
            "give the variable's name, not its content",
        )
    return found


def destination(value: object) -> str:
    """An OpenSSH destination; one that ssh would take for an option is refused."""
    found = text(value)
    if found.startswith("-") or any(c.isspace() for c in found):
        raise Unacceptable("bad_value", f"is {shown(found)}, no SSH destination")
    return found


def address(value: object) -> str:
    """A host name or IP address that others can dial (R59: so no wildcard)."""
    found = text(value)
    bare = found[1:-1] if found.startswith("[") and found.endswith("]") else found
    if _is_wildcard(bare):
        raise Unacceptable(
            "bad_address",
            f"is {shown(found)}, which nobody can dial",
            "give the address by which the other hosts reach this one",
        )
    if not _is_host(bare):
        raise Unacceptable("bad_address", f"is {shown(found)}, no host name or IP address")
    return bare


def bind(value: object) -> str:
    """`HOST:PORT` or `[IPV6]:PORT` to listen on."""
    found = text(value)
    try:
        split_address(found)
    except ValueError as error:
        raise Unacceptable(
            "bad_bind", f"is {shown(found)}: {error}", 'write bind = "127.0.0.1:8000"'
        ) from None
    return found


def split_address(bind: str) -> tuple[str, int]:
    """("::1", 8000) from "[::1]:8000".

    Raises:
        ValueError: not an address with a port from 1 to 65535; the text is a reason.
    """
    host, colon, digits = bind.rpartition(":")
    if not colon:
        raise ValueError("the port is missing")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and 0 < int(digits) < 65536):
        raise ValueError("the port does not lie between 1 and 65535")
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ValueError("what stands in brackets is no IPv6 address") from None
        return host[1:-1], int(digits)
    if ":" in host:
        raise ValueError("an IPv6 address needs brackets")
    if not _is_host(host):
        raise ValueError("the host is missing" if not host else "the host is malformed")
    return host, int(digits)


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "*", "0", "::0")


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        looks_numeric = all(part.isdigit() for part in host.split("."))
        return _HOSTNAME.fullmatch(host) is not None and not looks_numeric
    return True
