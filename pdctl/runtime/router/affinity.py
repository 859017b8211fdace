"""`policy = "prefix"`: a request goes where most of its prompt has been computed, against load.

Owned by the event loop. Only reading a prompt leaves it, for a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path as Folder
from typing import TYPE_CHECKING

import anyio
import msgspec

from pdctl.engines.channel import RouterAssignment
from pdctl.engines.registry import spec_for
from pdctl.errors import UsageError
from pdctl.handoff.store.keys import Space, prompt_keys
from pdctl.runtime.router.members import Roster
from pdctl.runtime.router.policy import Candidate, Path, choose
from pdctl.runtime.router.prefixes import Prefixes, computing, nearest
from pdctl.runtime.router.request import Ask
from pdctl.topology.model import PAGE_TOKENS, Policy, Role
from pdctl.topology.plan import Plan

if TYPE_CHECKING:
    from pdctl.runtime.router.prompts import PromptReader

log = logging.getLogger("pdctl.router")


class Affinity:
    """Remembers where prompts went, and chooses by it; other policies choose as they always do.

    Without a checkpoint on the router's host there is nothing to read prompts with: it says so
    once, and chooses by load.
    """

    def __init__(self, assignment: RouterAssignment, roster: Roster) -> None:
        self._roster = roster
        self._prefixes = Prefixes()
        self._incarnations: dict[str, int] = {}
        self._reader: PromptReader | None = None
        self._loading = anyio.Lock()
        self._blind = False
        self.adopt(assignment)

    def adopt(self, assignment: RouterAssignment) -> None:
        self._policy = Policy(assignment.policy)
        self._model_dir = assignment.model_dir
        self._contract = assignment.contract.digest
        self._prefixes.shared = sharing(assignment.plan)

    @property
    def reads(self) -> bool:
        """Whether prompts are read."""
        return self._policy is Policy.PREFIX and not self._blind

    async def keyed(self, ask: Ask) -> Ask:
        """With its prompt's length and page keys, where the policy needs and can tell them."""
        if not self.reads:
            return ask
        reader = await self._read_by()
        ids = None if reader is None else await reader.read(ask.endpoint, ask.body)
        if ids is None:
            return ask
        salt = ask.body.get("cache_salt")
        space = Space(contract=self._contract, salt=salt if isinstance(salt, str) else "")
        try:
            keys = prompt_keys(ids, space).pages
        except ValueError:
            keys = ()
        return msgspec.structs.replace(ask, keys=keys, prompt_tokens=len(ids))

    async def _read_by(self) -> PromptReader | None:
        async with self._loading:
            if self._reader is None and not self._blind:
                try:
                    self._reader = await self._load()
                except UsageError as error:
                    self._blind = True
                    log.warning("requests are routed by load, not by prefix: %s", error)
        return self._reader

    async def _load(self) -> PromptReader:
        if not self._model_dir:
            raise UsageError("no replica of this host has a checkpoint to read prompts with")
        return await anyio.to_thread.run_sync(_opened, Folder(self._model_dir))

    def choose(self, ask: Ask, candidates: Sequence[Candidate], turn: int) -> Path:
        """Raises ValueError: there is no candidate."""
        if not ask.keys:
            return choose(candidates, self._policy, turn)
        missing = {one.path: self._missing(computing(one.path), ask) for one in candidates}
        return nearest(candidates, missing, self._prefixes.usual, turn)

    def held_tokens(self, replica: str, ask: Ask) -> int:
        """Of the prompt, as far as it is known; a page that a store brings counts in part."""
        pages = len(ask.keys) + 1 - self._missing(replica, ask) if ask.keys else 0.0
        return int(pages * PAGE_TOKENS)

    def sent(self, path: Path, ask: Ask) -> None:
        """It goes there: what asks for the same prefix a moment later follows it."""
        replica = computing(path)
        if ask.keys and self._keeps(path):
            self._prefixes.computed(replica, ask.keys, self._missing(replica, ask))

    def _keeps(self, path: Path) -> bool:
        """Whether the engine's own cache, or its host's page store, has the prompt afterwards."""
        if path.prefill is None:
            return True
        plan = self._roster.plan
        replica = plan.replica(path.prefill)
        return plan.store_of(replica) is not None or spec_for(replica.engine).caches_handoffs

    def _missing(self, replica: str, ask: Ask) -> float:
        """Pages; a replica that was restarted since holds none."""
        seat = self._roster.seat(replica)
        incarnation = -1 if seat is None else seat.state.incarnation
        if self._incarnations.get(replica) != incarnation:
            self._incarnations[replica] = incarnation
            self._prefixes.forget(replica)
        return self._prefixes.missing(replica, ask.keys)


def _opened(model_dir: Folder) -> PromptReader:
    """In a thread: what reads prompts takes its time to import, and only this policy does."""
    from pdctl.runtime.router.prompts import PromptReader

    return PromptReader(model_dir)


def sharing(plan: Plan) -> frozenset[str]:
    """The replicas that compute prompts and read each other's pages through stores."""
    computing_ones = (r for r in plan.replicas if r.role is not Role.DECODE)
    return frozenset(r.name for r in computing_ones if plan.store_of(r) is not None)
