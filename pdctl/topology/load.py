"""From a TOML file to a `Topology`, with every problem collected in one pass.

`read` never gives up at the first fault: what can't be used is reported and left out, a
misspelt key is reported and then taken for what it seems to mean, so that the rules across
fields (`rules.py`) still see the rest. Only a `Draft` without errors is a topology to act on.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdctl.topology import fields, rules
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.fields import Unacceptable
from pdctl.topology.grammar import HANDOFF, HOST, MODEL, REPLICA, ROUTER, SHARING, TOP, Table
from pdctl.topology.model import (
    Engine,
    Handoff,
    Host,
    Model,
    Replica,
    Role,
    Router,
    Sharing,
    Topology,
)

MAX_FILE_BYTES = 1 << 20


_REPLICA_PLACEHOLDERS: dict[str, Any] = {"engine": Engine.MLX, "role": Role.BOTH, "model": "/"}


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What could be read of a file.

    `topology` holds placeholders where `diagnostics` has errors; None where the file is not
    TOML at all. `partial` says that some replica's role is unknown, so that "there is none"
    can't be said.
    """

    topology: Topology | None
    partial: bool
    diagnostics: tuple[Diagnostic, ...]


def load(path: str | os.PathLike[str]) -> tuple[Topology | None, list[Diagnostic]]:
    """The topology of a file and everything wrong with the file alone, rules included.

    The topology is None when there is an error; warnings leave it. Never raises for what is
    in the file; a missing or unreadable file is a diagnostic too.
    """
    return judge(read(path))


def loads(text: str, source: str = "topology") -> tuple[Topology | None, list[Diagnostic]]:
    """As `load`, from text; `source` names it in messages."""
    return judge(read_text(text, source))


def judge(draft: Draft) -> tuple[Topology | None, list[Diagnostic]]:
    """Adds the rules across fields to what reading found."""
    found = list(draft.diagnostics)
    if draft.topology is not None:
        found += rules.check(draft.topology, partial=draft.partial)
    failed = any(d.severity is Severity.ERROR for d in found)
    return (None if failed else draft.topology), found


def read(path: str | os.PathLike[str]) -> Draft:
    """Reads a file without the rules across fields; see `Draft`."""
    source = os.fspath(path)
    try:
        raw = _content(Path(path).expanduser())
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        hint = "`pdctl init` writes a starter topology"
        return _unreadable("missing", f"there is no file {source}", hint)
    except UnicodeDecodeError as error:
        summary = f"{source} is not UTF-8 text, from byte {error.start}"
        return _unreadable("syntax", summary, "save it as UTF-8, or give the path of a topology")
    except IsADirectoryError:
        hint = "give the path of a file in it"
        return _unreadable("unreadable", f"{source} is a directory", hint)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _unreadable("unreadable", f"{source} can't be read: {reason}")
    if len(raw) > MAX_FILE_BYTES:
        return _unreadable("unreadable", f"{source} is over 1 MiB, which no topology is")
    return read_text(text, source)


def _content(path: Path) -> bytes:
    """OSError for what is no regular file either: opening a pipe would wait for its writer."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def read_text(text: str, source: str = "topology") -> Draft:
    """As `read`, from text."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        return _syntax_error(source, error)
    if not document:
        hint = "`pdctl init` writes a starter topology"
        return _unreadable("empty", f"{source} is empty", hint)
    return _Reading().document(document)


def _unreadable(code: str, summary: str, hint: str | None = None) -> Draft:
    found = Diagnostic(code=f"topology.{code}", summary=summary, hint=hint)
    return Draft(topology=None, partial=True, diagnostics=(found,))


def _syntax_error(source: str, error: Exception) -> Draft:
    if isinstance(error, RecursionError):
        return _unreadable("syntax", f"{source} is nested too deeply")
    if not isinstance(error, tomllib.TOMLDecodeError):
        return _unreadable("syntax", f"{source} holds a number with thousands of digits")
    place = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
    reason = str(error)[: place.start()] if place else str(error)
    where = f", line {place[1]}, column {place[2]}" if place and place[1] else ", at its end"
    return _unreadable("syntax", f"{source}{where}: {reason[:1].lower()}{reason[1:]}")


class _Reading:
    """One pass over one document: collects diagnostics, returns typed values."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []
        self.partial = False

    def document(self, document: dict[str, Any]) -> Draft:
        top = self.table(document, TOP, "")
        sections = {
            key: self.table(top.get(key, {}), table, key)
            for key, table in (
                ("model", MODEL), ("handoff", HANDOFF), ("sharing", SHARING), ("router", ROUTER)
            )
            if key in top or key != "model"
        }  # fmt: skip
        hosts = self.hosts(top.get("hosts", {}))
        replicas = tuple(
            replica
            for place, item in enumerate(top.get("replicas", ()))
            if (replica := self.replica(item, place)) is not None
        )
        self.partial |= "replicas" in document and "replicas" not in top
        model: dict[str, Any] = {"name": "?", "context_length": 1} | sections.get("model", {})
        topology = Topology(
            name=top.get("name", "?"),
            model=Model(**model),
            handoff=Handoff(**sections["handoff"]),
            sharing=Sharing(**sections["sharing"]) if "sharing" in top else None,
            router=Router(**sections["router"]),
            hosts=hosts,
            replicas=replicas,
        )
        return Draft(topology=topology, partial=self.partial, diagnostics=tuple(self.found))

    def hosts(self, declared: dict[str, Any]) -> dict[str, Host]:
        hosts = {"local": Host(name="local")}
        for key, body in declared.items():
            place = f"hosts.{key}"
            if fields.NAME.fullmatch(key) is None:
                summary = f"host {fields.shown(key)} has no valid name"
                hint = "a name has at most 48 of a-z, 0-9 and -"
                self.report("bad_name", summary, place, hint=hint)
            if type(body) is not dict:
                self.report("wrong_type", f"{place} is {fields.kind_of(body)}, not a table", place)
                body = {}
            hosts[key] = Host(name=key, **self.table(body, HOST, place))
        return hosts

    def replica(self, body: object, index: int) -> Replica | None:
        place = f"replicas[{index}]"
        if type(body) is not dict:
            self.report("wrong_type", f"{place} is {fields.kind_of(body)}, not a table", place)
            self.partial = True
            return None
        named = body.get("name")
        replica = named if isinstance(named, str) and fields.NAME.fullmatch(named) else None
        values = self.table(body, REPLICA, place, replica)
        if "role" not in values:
            self.partial = True
        if "engine" not in values:
            values.pop("engine_config", None)
        return Replica(**{**_REPLICA_PLACEHOLDERS, "name": place, **values})

    def table(
        self, body: dict[str, Any], known: Table, place: str, replica: str | None = None
    ) -> dict[str, Any]:
        """The usable values of a table; problems go to `found`."""
        values: dict[str, Any] = {}
        seen: set[str] = set()
        for key, value in body.items():
            meant = key if key in known else self.unknown(key, known, body, place, replica)
            if meant is None or meant in seen:
                continue
            seen.add(meant)
            try:
                values[meant] = known[meant].read(value)
            except Unacceptable as error:
                where = _join(place, key)
                summary = f"{_subject(place, replica)}{key} {error.reason}"
                self.report(error.code, summary, where, replica, error.hint)
        for key, field in known.items():
            if field.required and key not in seen:
                summary = f"{_subject(place, replica)}{key} is missing"
                hint = f"add {key} = …; `pdctl init` writes an example"
                self.report("missing_field", summary, _join(place, key), replica, hint)
        return values

    def unknown(
        self,
        key: str,
        known: Table,
        body: Mapping[str, Any],
        place: str,
        replica: str | None,
    ) -> str | None:
        """Reports an unknown key; returns the known one that it seems to mean."""
        near = nearest(key, known)
        hint = f'did you mean "{near}"?' if near else "known keys: " + ", ".join(known)
        where = _join(place, key)
        summary = f"{_subject(place, replica)}unknown key {fields.shown(key)}"
        self.report("unknown_key", summary, where, replica, hint)
        return near if near not in body else None

    def report(
        self,
        code: str,
        summary: str,
        field: str,
        replica: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.found.append(
            Diagnostic(
                code=f"topology.{code}", summary=summary, field=field, replica=replica, hint=hint
            )
        )


def nearest(key: str, known: Collection[str]) -> str | None:
    """The known name that a misspelt one most likely means."""
    flat = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(key.lower().replace("-", "_"), flat, n=1, cutoff=0.6)
    return flat[close[0]] if close else None


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _subject(place: str, replica: str | None) -> str:
    """The start of a sentence about a table: `replica "p0": `, `handoff: `, or nothing."""
    if replica is not None:
        return f'replica "{replica}": '
    return f"{place}: " if place else ""
