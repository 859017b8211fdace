"""The latest failures, as `/status` keeps them."""

from __future__ import annotations

import pytest
from runtime.router.cluster import CHAT, COMPLETION, cluster, eventually
from runtime.router.fakes import fails

from pdctl.errors import HANDOFF_CAUSES
from pdctl.runtime.router.advice import HINTS, hint_for
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.recent import KEPT, MESSAGE_CHARACTERS, RecentFailures

SECRET = "the client's own words"


def failed(code: str, *, replica: str = "d0", status: int = 502, **rest: str) -> RequestFailed:
    failure = RequestFailed(
        status, rest.get("message", "it broke"), code=code, leg="decode", replica=replica
    )
    failure.path, failure.room = f"p0>{replica}", 1 << 61
    return failure


def test_failures_of_one_kind_are_one_entry() -> None:
    """The latest in full, how many, and since when; the newest kind stands first."""
    recent = RecentFailures("studio")
    recent.add(failed("peer_lost", message="the first"), at=10.0)
    recent.add(failed("expired"), at=11.0)
    recent.add(failed("peer_lost", message="the second"), at=12.0)
    lost, expired = recent.newest_first()
    assert (lost.cause, lost.count, lost.first_at, lost.at) == ("peer_lost", 2, 10.0, 12.0)
    assert lost.message == "the second"
    assert (expired.cause, expired.count) == ("expired", 1)
    assert lost.room == str(1 << 61)


def test_the_list_is_bounded() -> None:
    """The oldest kind goes."""
    recent = RecentFailures("studio")
    for number in range(KEPT + 3):
        recent.add(failed("peer_lost", replica=f"d{number}"))
    kept = recent.newest_first()
    assert len(kept) == KEPT
    assert (kept[0].replica, kept[-1].replica) == (f"d{KEPT + 2}", "d3")


@pytest.mark.parametrize("code", ["invalid_type", "unknown_path", "model_not_found"])
def test_a_clients_mistake_is_not_kept(code: str) -> None:
    """It is the client's, and its message may quote the request."""
    recent = RecentFailures("studio")
    recent.add(failed(code, status=400, message=SECRET))
    assert recent.newest_first() == ()


def test_a_prompt_over_the_budget_is_kept() -> None:
    """A 400, yet a setting of the cluster."""
    recent = RecentFailures("studio")
    recent.add(failed("over_budget", status=400))
    assert recent.newest_first()[0].hint == hint_for("over_budget", "studio", "d0")


def test_a_message_is_printable_and_short() -> None:
    recent = RecentFailures("studio")
    recent.add(failed("protocol", message="\x1b[31m\x00" + "x" * 10_000))
    (kept,) = recent.newest_first()
    assert kept.message.isprintable()
    assert len(kept.message) == MESSAGE_CHARACTERS + 1


@pytest.mark.anyio
async def test_an_engines_free_text_is_not_shown() -> None:
    """It may quote what it was sent; the client has it, and the logs; the page says where."""
    async with cluster("p0 d0") as c:
        c["d0"].on["decode"] = fails(500, f"cannot serve {SECRET}", None)
        answer = await c.ask(CHAT)
        assert SECRET in await answer.text()
        status = await (await c.http.get(c.url("/status"))).json()
        (kept,) = status["failures"]
        assert kept["cause"] == "engine_error"
        assert kept["message"] == 'decode replica "d0": its engine reported an error'
        assert kept["hint"] == "its own words are in `pdctl logs test d0 router`"
        assert SECRET not in str(status)


@pytest.mark.anyio
async def test_neither_keys_nor_tickets_nor_prompts_are_shown() -> None:
    """R60: with a request in flight and another that failed, `/status` and `/metrics` have the
    rooms and nothing that opens a door."""
    async with cluster("p0 d0", api_key="s3cret") as c:
        key = {"Authorization": "Bearer s3cret"}
        c["d0"].on["decode"] = fails(502, "p0 closed the connection", "peer_lost")
        assert (await c.ask({**COMPLETION, "prompt": SECRET}, **key)).status == 502
        (_, body) = c["d0"].bodies[-1]
        for path in ("/status", "/metrics"):
            shown = await (await c.http.get(c.url(path), headers=key)).text()
            assert "peer_lost" in shown
            for hidden in (SECRET, "s3cret", body["pdctl"]["ticket"], bytes(32).hex()):
                assert hidden not in shown


@pytest.mark.anyio
async def test_what_was_retried_and_what_had_no_path_is_kept() -> None:
    """A first try that failed under a request which then succeeded; a request that no path took."""
    async with cluster("p0 d0 d1") as c:
        await c["d0"].kill()
        answers = [await c.ask(CHAT) for _ in range(2)]
        assert {a.status for a in answers} == {200}
        (retried,) = c.router.meter.recent.newest_first()
        assert (retried.path, retried.replica) == ("p0>d0", "d0")
        assert retried.cause in ("replica_down", "replica_lost")
        c.keeper.set_state("p0", "failed", "it exited with status 3")
        await eventually(lambda: not c.router.roster.ready())
        assert (await c.ask(CHAT)).status == 503
        nowhere = c.router.meter.recent.newest_first()[0]
        assert (nowhere.cause, nowhere.path, nowhere.room) == ("nothing_ready", None, None)
        assert "it exited with status 3" in nowhere.message


@pytest.mark.parametrize("cause", [*HANDOFF_CAUSES, *HINTS])
def test_every_cause_has_a_hint(cause: str) -> None:
    """With names filled in, and one for every cause of a handoff."""
    hint = hint_for(cause, "studio", "d0")
    assert hint is not None
    assert "{" not in hint


def test_a_cause_that_is_not_known_has_none() -> None:
    assert hint_for("of another version", "studio", None) is None
