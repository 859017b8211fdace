"""Two MLX loops, one of which sends to the other, beside a page store: only what that lacks is
computed, and only what it lacks travels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("mlx_lm")

from engines.mlx.loops import WAIT_S, Engine, asked, tokens_of, until
from engines.replicas import contract_of
from handoff.store.stores import Host, Replica
from tiny import digits, make_checkpoint

from pdctl.engines.mlx.call import Call
from pdctl.handoff.store.loans import PinnedLoan
from pdctl.topology.contract import Contract
from pdctl.topology.model import PAGE_TOKENS, ComputeDtype

pytestmark = pytest.mark.engine

TOKENS = 200


class End:
    """One loop and its client of the store, counting since the test began."""

    def __init__(self, model_dir: Path, contract: Contract, socket: str) -> None:
        self.client = Replica(socket, contract)
        self.engine = Engine(model_dir, contract, ComputeDtype.FLOAT32, self.client.store)

    def begin(self) -> None:
        self.client.connect()
        self._before = (self.client.board.read(), self.engine.board.read())

    @property
    def stored(self) -> int:
        """Pages."""
        return self.client.board.read().stored_pages - self._before[0].stored_pages

    @property
    def reused(self) -> int:
        """Positions that it took from the store."""
        return self.client.board.read().reused_tokens - self._before[0].reused_tokens

    @property
    def imported(self) -> int:
        return self.engine.board.read().imported_tokens - self._before[1].imported_tokens

    def close(self) -> None:
        self.engine.close()
        self.client.store.close()


class Beside:
    """Prefill, decode, and the store of their host."""

    def __init__(self, p: End, d: End, host: Host) -> None:
        self.p, self.d, self.host = p, d, host

    def both_legs(self, prompt: str, salt: str = "", keeps: bool = True) -> tuple[Call, Call]:
        leg = self.p.engine.leg()
        request, arguments, plain = asked(prompt, 6, leg)
        fields = msgspec.structs.replace(plain, keeps_prefix=keeps, salt=salt)
        prefill = self.p.engine.admission.admit(request, arguments, fields)
        return prefill, self.d.engine.decoding.admit(*asked(prompt, 6, leg)[:2], fields)

    def handoff(self, prompt: str, salt: str = "", keeps: bool = True) -> list[int]:
        """Decode's tokens, once both ends are through with it."""
        prefill, decode = self.both_legs(prompt, salt, keeps)
        prefill.first()
        found = tokens_of(decode)
        self.at_rest()
        return found

    def stores(self, prompt: str, salt: str = "") -> list[int]:
        """The same, of a prompt that the store has not."""
        stored = self.p.stored
        found = self.handoff(prompt, salt)
        until(lambda: self.p.stored == stored + -(-len(prompt) // PAGE_TOKENS))
        return found

    def alone(self, prompt: str) -> list[int]:
        return tokens_of(self.d.engine.admit(prompt, max_tokens=6))

    def at_rest(self) -> None:
        until(self.p.engine.idle)
        until(self.d.engine.idle)
        assert self.host.returned()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp("model")
    model_dir: Path = make_checkpoint(folder / "llama", "llama")
    contract = contract_of(model_dir)
    host = Host(folder / "s.kv", contract=contract)
    p, d = (End(model_dir, contract, host.path) for _ in range(2))
    for each in (p, d):
        assert each.engine.loop.loaded.wait(WAIT_S), each.engine.died
    yield Beside(p, d, host)
    for each in (p, d):
        each.close()
    host.close()


@pytest.fixture
def beside(running: Beside) -> Iterator[Beside]:
    for each in (running.p, running.d):
        each.begin()
    yield running
    running.at_rest()
    assert running.p.engine.died + running.d.engine.died == []


def prompt_of(test: int) -> str:
    """The first token of which begins no other test's prompt."""
    return f"{test}{digits(TOKENS - 1, seed=test)}"


def test_a_prompt_is_computed_and_sent_once(beside: Beside) -> None:
    """The first handoff stores it whole, tail included; the second computes one position of 200
    and sends the seven that are in no full page. The text is that of decode alone."""
    prompt = prompt_of(1)
    alone = beside.alone(prompt)
    assert beside.stores(prompt) == alone
    # pages that were stored before decode had memory did not travel
    assert (beside.p.reused, beside.d.imported + beside.d.reused) == (0, 199)
    reused, imported = beside.d.reused, beside.d.imported
    assert beside.handoff(prompt) == alone
    assert (beside.p.stored, beside.p.reused) == (4, 199)
    assert (beside.d.reused - reused, beside.d.imported - imported) == (192, 7)


def test_another_question_computes_and_sends_what_it_adds(beside: Beside) -> None:
    """Every full page that both prompts share is taken by both ends."""
    document = prompt_of(2)
    beside.stores(document)
    reused, imported = beside.d.reused, beside.d.imported
    other = document[:150] + digits(60)[::-1]
    assert beside.handoff(other) == beside.alone(other)
    assert beside.p.reused == 128
    assert beside.d.reused - reused >= 128
    assert beside.d.reused - reused + beside.d.imported - imported == 209
    until(lambda: beside.p.stored == 4 + 2)


def test_handoffs_of_two_tenants_share_nothing(beside: Beside) -> None:
    """R48: at neither end."""
    prompt = prompt_of(3)
    beside.stores(prompt, salt="one")
    assert beside.stores(prompt, salt="two") == beside.alone(prompt)
    assert beside.p.reused == 0


def test_a_handoff_that_keeps_nothing_neither_reads_nor_writes(beside: Beside) -> None:
    """`pdctl_cache` false, as canaries and benches ask: all of it is computed and sent."""
    prompt = prompt_of(4)
    beside.stores(prompt)
    reused, imported = beside.d.reused, beside.d.imported
    beside.handoff(prompt, keeps=False)
    assert (beside.p.stored, beside.p.reused) == (4, 0)
    assert (beside.d.reused - reused, beside.d.imported - imported) == (0, 199)


def test_a_store_that_ended_is_a_miss_for_both_ends(beside: Beside) -> None:
    """The handoff is whole, and shared again when the store is back."""
    prompt = prompt_of(5)
    alone = beside.alone(prompt)
    beside.host.server.close()
    for each in (beside.p, beside.d):
        each.client.connect(wanted=False)
    assert beside.handoff(prompt) == alone
    assert (beside.p.stored, beside.d.reused, beside.d.imported) == (0, 0, 199)
    beside.host.serve()
    for each in (beside.p, beside.d):
        each.client.connect()
    assert beside.stores(prompt) == alone


def test_a_store_that_goes_away_while_decode_copies_leaves_all_to_the_sender(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied is written over."""
    prompt = prompt_of(7)
    alone = beside.stores(prompt)
    imported, release = beside.d.imported, PinnedLoan.release

    def lost(loan: PinnedLoan, used_tokens: int = 0) -> bool:
        release(loan)
        return False

    monkeypatch.setattr(PinnedLoan, "release", lost)
    assert beside.handoff(prompt) == alone
    assert beside.d.imported - imported == 199
    assert beside.p.reused == 0


def test_clients_that_leave_give_pages_and_memory_back(beside: Beside) -> None:
    """U7: whatever has been taken by then, at either end."""
    prompt = prompt_of(6)
    alone = beside.stores(prompt)
    for leaver in (0, 1):
        prefill, decode = beside.both_legs(prompt)
        ends = [(beside.p.engine.admission, prefill), (beside.d.engine.decoding, decode)]
        for admission, call in (ends[leaver], ends[1 - leaver]):
            admission.cancel(call)
        beside.at_rest()
    assert beside.handoff(prompt) == alone
