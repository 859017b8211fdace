"""S5, S8: vLLM's and SGLang's own handoffs between two replicas on CPUs, as a user has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from e2e.mixed import Mixed
from e2e.natives import (
    LENGTHS,
    check_answers,
    check_counted,
    check_killed,
    check_leaving,
    check_loopback,
    needs_nixl,
)
from engines import sglang_replicas, vllm_replicas
from tiny import digits

from pdctl.engines.vllm.spec import TO_BE_READ

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VLLM = pytest.param(
    "vp vd",
    id="vllm",
    marks=[vllm_replicas.needs_vllm, needs_nixl(vllm_replicas.PYTHON)],
)
SGLANG = pytest.param(
    "sp sd mo",
    id="sglang",
    marks=[sglang_replicas.needs_sglang, needs_nixl(sglang_replicas.PYTHON)],
)
LEASE_S = 30.0
"""Of blocks that vLLM's decode never hears of."""
SOON_S = 10.0


class Native(Mixed):
    """A pair, its prefill replica first; the last replica computes alone what its texts are
    compared with: vLLM's decode itself, MLX beside SGLang's, which can't."""

    def __init__(self, folder: Path, model_dir: Path, replicas: str) -> None:
        native = 'transport = "native"'
        super().__init__(folder, model_dir, replicas, context_length=2048, handoff=native)
        self.prefill, self.decode, *_ = names = replicas.split()
        self.path = f"{self.prefill}>{self.decode}"
        self.alone = names[-1]

    @property
    def is_vllm(self) -> bool:
        return self.prefill[0] == "v"


@pytest.fixture(scope="module", params=[VLLM, SGLANG])
def pair(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Native]:
    folder = tmp_path_factory.mktemp("native")
    with Native(folder, checkpoints["llama"], request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("tokens", LENGTHS)
def test_its_answers_are_those_of_a_replica_alone(pair: Native, tokens: int) -> None:
    check_answers(pair, pair.path, pair.alone, tokens)


def test_handoffs_are_counted_where_their_end_is_known(pair: Native) -> None:
    """vLLM's prefill can't tell a reader from a lease that ran out."""
    check_counted(pair, pair.path)
    sent, received = (
        pair.replica(name)["handoffs_completed"] for name in (pair.prefill, pair.decode)
    )
    assert received > 0
    assert sent == (None if pair.is_vllm else received)


def test_nothing_listens_beyond_loopback(pair: Native) -> None:
    check_loopback(pair, pair.prefill, pair.decode)


def test_clients_that_leave_take_nothing_along(pair: Native) -> None:
    """U2: vLLM's prefill keeps what decode never heard of, until its lease ends."""
    check_leaving(pair, pair.path, 12)
    check_answers(pair, pair.path, pair.alone, 65)
    if pair.is_vllm:
        pair.wait("decode's blocks are free", lambda: pair.kept(pair.decode) == 0, SOON_S)
        bound_s = LEASE_S + SOON_S
        pair.wait("prefill's blocks are free", lambda: pair.kept(pair.prefill) == 0, bound_s)


@pytest.mark.parametrize("pair", [VLLM], indirect=True)
def test_a_prompt_that_nobody_fetches_is_kept_for_its_lease(pair: Native) -> None:
    """R7: an idle prefill replica of vLLM lets go of it by itself, and hands over meanwhile.
    SGLang's legs meet before anything is computed."""
    port = pair.record().plan.replica(pair.prefill).http_port
    body = {"model": pair.model, "prompt": digits(700, 4), "max_tokens": 1}
    asked = {**body, "kv_transfer_params": dict(TO_BE_READ)}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kv_transfer_params"]["remote_block_ids"]
    pair.wait("it is kept", lambda: pair.kept(pair.prefill) > 0, SOON_S)
    check_answers(pair, pair.path, pair.alone, 65)
    pair.wait("it is let go", lambda: pair.kept(pair.prefill) == 0, LEASE_S + SOON_S)


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_a_killed_end_comes_back(pair: Native, end: str) -> None:
    check_killed(pair, pair.path, pair.alone, pair.prefill if end == "prefill" else pair.decode)
