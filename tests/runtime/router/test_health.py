"""A replica that is gone closes its pairs whole, and nothing else."""

from __future__ import annotations

import pytest
from runtime.router.cluster import CHAT, cluster, eventually

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("state", ["backoff", "starting", "failed", "stopped", "unreachable"])
async def test_no_leg_goes_to_a_pair_whose_prefill_is_gone(state: str) -> None:
    """U19: the decode replica gets no leg that waits for a dead sender, but serves on with the
    other one; the dead one gets nothing at all."""
    async with cluster("p0 p1 d0") as c:
        c.keeper.set_state("p0", state, "it was ended by SIGKILL")
        await eventually(lambda: [p.text for p in c.router.roster.ready()] == ["p1>d0"])
        answers = [await c.ask(CHAT) for _ in range(12)]
        assert {a.status for a in answers} == {200}
        assert {a.headers["x-pdctl-path"] for a in answers} == {"p1>d0"}
        assert c["p0"].bodies == []
        assert {body["pdctl"]["prefill"] for _, body in c["d0"].bodies} == {"p1"}


async def test_without_any_prefill_the_ordinary_replica_serves() -> None:
    """R71: and decode, which could serve alone, is not half used as if it were one."""
    async with cluster("p0 d0 o0") as c:
        c.keeper.set_state("p0", "failed", "it exited with status 3")
        await eventually(lambda: [p.text for p in c.router.roster.ready()] == ["o0"])
        assert (await c.ask(CHAT)).headers["x-pdctl-path"] == "o0"
        assert c["d0"].bodies == []
        pinned = await c.ask(CHAT, x_pdctl_path="p0>d0")
        assert pinned.status == 503
        assert "it exited with status 3" in await pinned.text()
