"""Pages on the devices as a user has it: `transport = "auto"`, and two vLLM replicas that name one.
This machine's memory stands for a device's; copies are torch's, the rest is what runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.mixed import PLANE, Mixed, title
from e2e.natives import check_answers, check_killed, check_leaving, check_loopback
from engines.vllm_replicas import needs_vllm
from tiny import digits

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_vllm]

PATH = "vp>vd"
PAGE_BYTES = 128 << 10
REASON = "auto → nixl: device memory, read by the decode replica"


class OnDevices(Mixed):
    def write(self, *more: str) -> None:
        super().write(*more)
        text = self.topology.read_text()
        text = text.replace('engine = "vllm"', 'engine = "vllm"\ndevices = [0]')
        self.topology.write_text(text.replace("env = {", 'env = { PDCTL_DEVICE = "host", '))


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("device")
    with OnDevices(folder, checkpoints["llama"], "vp vd", context_length=2048) as cluster:
        yield cluster


@pytest.mark.parametrize("tokens", [65, 700])
def test_its_answers_are_those_of_decode_alone(pair: Mixed, tokens: int) -> None:
    """S4: chat and completions, streamed and not."""
    check_answers(pair, PATH, "vd", tokens)


def test_the_way_of_its_pages_is_told(pair: Mixed) -> None:
    """By plan, ps, /status and the answer itself; its bytes are the device's, none the host's."""
    before = pair.pair("vp", "vd")
    answer = pair.completion(digits(193, 5), PATH, max_tokens=2, cache_salt="told")
    assert (answer.status_code, answer.headers["x-pdctl-transport"]) == (200, "nixl")
    after = pair.pair("vp", "vd")
    assert (after["transport"], after["transport_reason"]) == ("nixl", REASON)
    assert after["gpu_bytes"] - before["gpu_bytes"] == 3 * PAGE_BYTES
    assert after["host_bytes"] == 0
    assert f"({REASON})" in pair.pdctl("plan", pair.topology).stdout
    assert REASON in pair.pdctl("ps", pair.topology).stdout


def test_no_process_beside_an_engine_moves_its_pages(pair: Mixed) -> None:
    """Its own can: no byte of them comes to an interpreter."""
    for name in ("vp", "vd"):
        assert not [each for each in map(title, pair.processes(name)) if PLANE in each]
    check_loopback(pair, "vp", "vd")


def test_clients_that_leave_leave_nothing(pair: Mixed) -> None:
    """R10: also while pages are read and placed."""
    check_leaving(pair, PATH, 12)
    check_answers(pair, PATH, "vd", 130)


def test_prefill_that_is_killed_comes_back_and_is_read_again(pair: Mixed) -> None:
    """U14, R61: its new process exposes memory of its own."""
    check_killed(pair, PATH, "vd", "vp")
