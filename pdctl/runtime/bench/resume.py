"""Going on with a sweep that was ended: which places its folder has whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import pdctl
from pdctl.errors import UsageError
from pdctl.runtime.bench.folder import read_points
from pdctl.runtime.bench.measure import Place
from pdctl.runtime.bench.settings import Settings
from pdctl.runtime.bench.summary import Point, Setting
from pdctl.topology.plan import Plan


class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder has of the sweep that is asked for."""

    date: str | None = None
    """Of the run to go on with; None where there is none."""
    points: tuple[Point, ...] = ()
    """Of places that need not be run again."""
    unreadable: tuple[str, ...] = ()
    """Names of files that are no points; they are left as they are."""

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(place_of(p) for p in self.points)


def setting_of(plan: Plan, settings: Settings) -> Setting:
    """What two points must share to belong to one sweep; lengths and lanes may be added."""
    declared = [replica.declared for replica in plan.replicas]
    topology = msgspec.json.encode([declared, plan.pairs], order="sorted")
    return {
        "cluster": plan.cluster,
        "model": plan.model,
        "contract": plan.contract_digest,
        "topology": hashlib.sha256(topology).hexdigest(),
        "page_bytes": plan.page_bytes,
        "pdctl": pdctl.__version__,
        "output_len": settings.output_len,
        "num_prompts": settings.num_prompts,
        "num_warmups": settings.num_warmups,
        "seed": settings.seed,
        "goodput": " ".join(f"{name}:{ms:g}" for name, ms in settings.goodput.items()),
    }


def earlier(directory: Path, setting: Setting, settings: Settings, paths: Sequence[str]) -> Earlier:
    """The newest run in `directory`, as far as `settings` ask for it.

    A place counts where every path has all its rounds there and no request of it failed: paths
    take turns within a round, so that one of them is never run again by itself.

    Raises UsageError, naming the first difference, where that run had other settings.
    """
    found, unreadable = read_points(directory)
    if not found:
        return Earlier(unreadable=unreadable)
    date = max(p.date for p in found)
    newest = [p for p in found if p.date == date]
    for p in newest:
        _refuse_other(directory, p.pd_setting, setting)
    whole = {
        place: [p for p in newest if place_of(p) == place and _is_whole(p)]
        for place in places(settings)
    }
    kept = [p for ps in whole.values() if {p.pd_path for p in ps} == set(paths) for p in ps]
    return Earlier(date=date, points=tuple(kept), unreadable=unreadable)


def in_order(points: Sequence[Point], settings: Settings, paths: Sequence[str]) -> list[Point]:
    """As one uninterrupted sweep would have them."""
    order = {place: number for number, place in enumerate(places(settings))}
    return sorted(points, key=lambda p: (order[place_of(p)], paths.index(p.pd_path)))


def places(settings: Settings) -> list[Place]:
    """In the order that they are measured."""
    return [Place(n, lanes) for lanes in settings.concurrency for n in settings.input_lens]


def place_of(p: Point) -> Place:
    return Place(p.pd_input_len, p.pd_concurrency)


def _is_whole(p: Point) -> bool:
    return p.pd_rounds == p.pd_rounds_asked and p.failed == 0


def _said(value: object) -> object:
    return "nothing" if value in ("", None) else value


def _refuse_other(directory: Path, was: Mapping[str, object], asked: Mapping[str, object]) -> None:
    for name in asked:
        if was.get(name) != asked[name]:
            shown = (
                "differs"
                if name in ("contract", "topology")
                else f"was {_said(was.get(name))}, not {_said(asked[name])}"
            )
            raise UsageError(
                f"--resume: the run in {directory} is of another setting: {name} {shown}",
                hint="ask for the same as then, or name another --result-dir",
            )
