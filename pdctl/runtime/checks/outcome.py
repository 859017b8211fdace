"""What validation hands back, and what it tells while it works."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdctl.engines.interface import Probe
from pdctl.topology.checkpoint import Checkpoint
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Report
from pdctl.topology.fingerprint import Fingerprint
from pdctl.topology.model import Topology
from pdctl.topology.plan import Plan


class Watcher(Protocol):
    """Told about progress; `step` from the validating thread, the others from any."""

    def step(self, text: str) -> None: ...

    def host(self, name: str, text: str) -> None:
        """What that host is asked now."""
        ...

    def hashing(self, model_dir: str, done_bytes: int, total_bytes: int) -> None:
        """`model_dir` as a person writes it: `gpu1:/models/x` where it lies elsewhere."""
        ...


class Silent:
    """A watcher that shows nothing."""

    def step(self, text: str) -> None:
        pass

    def host(self, name: str, text: str) -> None:
        pass

    def hashing(self, model_dir: str, done_bytes: int, total_bytes: int) -> None:
        pass


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica would serve."""

    replica: str
    model_dir: str
    """Absolute, on its host."""
    real_dir: str
    """Links followed."""
    checkpoint: Checkpoint
    content: Fingerprint | None = None
    """None until it was fingerprinted."""
    contract: Contract | None = None
    probe: Probe | None = None


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. Without errors in `report`, `topology` and `plan` are there; and `contract`
    too, unless it was offline."""

    report: Report
    topology: Topology | None = None
    plan: Plan | None = None
    contract: Contract | None = None
    models: dict[str, ModelFacts] = {}
    """Replica → what it would serve."""
    homes: dict[str, str] = {}
    """Host → where the clusters' folders lie there; of hosts that were asked."""
