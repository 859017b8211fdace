"""`python -m pdctl.engines.mlx.server`: mlx_lm.server's options, as a replica of a cluster.

Started by an agent, which assigns role, key and contract over its socket. Ready is reported
once the weights are loaded, a forward has run, and both ports listen.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from importlib.metadata import version
from types import FrameType
from typing import Any

import mlx_lm.server as library
import msgspec

from pdctl.engines.attachment import ATTACH_TIMEOUT_S, Attachment
from pdctl.engines.channel import Ready
from pdctl.engines.ends import Ends, close_each, open_ends, open_store
from pdctl.engines.mlx.admission import Admission
from pdctl.engines.mlx.effective import read_attention, read_positions
from pdctl.engines.mlx.http import Server
from pdctl.engines.mlx.loop import EngineLoop
from pdctl.engines.readiness import effective_of, terms_of
from pdctl.errors import HandoffCancelled, LaunchError, PdctlError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.store.client import StoreClient
from pdctl.topology.contract import Attention
from pdctl.topology.model import Engine

log = logging.getLogger("pdctl.engines.mlx")

STOP_WITHIN_S = 4.5
THREAD_SWITCH_S = 0.0005
"""The loop holds the interpreter while it builds a forward's graph (10 ms at 30 layers); at
Python's own 5 ms a handoff's thread would wait that long for each turn."""


class Stopped(BaseException):
    """SIGTERM or SIGINT, raised in the main thread."""


class Replica:
    """One process: engine loop, both handoff ends, HTTP, and the agent's socket."""

    def __init__(self) -> None:
        self._board = CounterBoard()
        self._attachment = Attachment.from_environment(
            os.environ, counters=self._board.read, superseded=lambda: _leave(1)
        )
        self._ends = Ends()
        self._store: StoreClient | None = None
        self._engine: EngineLoop | None = None

    def attach(self) -> None:
        """Raises LaunchError when the agent refuses, or does not answer in time."""
        self._assigned = self._attachment.open(ATTACH_TIMEOUT_S)

    def serve(self, host: str, port: int, provider: Any) -> None:
        """Until a signal; replaces `mlx_lm.server.run`, whose parser made the arguments."""
        for noisy in ("httpx", "transformers"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        assigned = self._assigned
        engine = self._engine = EngineLoop(
            provider,
            contract=assigned.contract,
            compute=assigned.compute_dtype,
            board=self._board,
            died=self._died,
        )
        # the loop either loads or ends the process
        engine.loaded.wait()
        self._ends = open_ends(assigned, self._board, self._attachment.failed, os.environ)
        self._store = open_store(assigned, self._board)
        data_port = self._ends.listen()
        admission = Admission(
            engine,
            replica=assigned.replica,
            role=assigned.role,
            on_failure=assigned.handoff.on_failure,
            sender=self._ends.sender,
            receiver=self._ends.receiver,
            store=self._store,
        )
        with Server(host, port, engine, admission) as server:
            self._attachment.ready(self._ready(engine, server.server_address[1], data_port))
            log.info("replica=%s ready, role=%s", assigned.replica, assigned.role.value)
            server.serve_forever()

    def stop(self) -> None:
        """Ends what runs, then every resource; a failing step skips none of the next."""
        threading.Timer(STOP_WITHIN_S, _leave, (1,)).start()
        steps = [self._end_calls, self._ends.close, self._attachment.close]
        close_each(steps if self._store is None else [*steps[:1], self._store.close, *steps[1:]])
        _leave(0)

    def _end_calls(self) -> None:
        if self._engine is not None:
            self._engine.end_all(HandoffCancelled("the replica is stopping"))

    def _ready(self, engine: EngineLoop, http_port: int, data_port: int | None) -> Ready:
        contract, model = self._assigned.contract, engine.model
        return Ready(
            engine=Engine.MLX,
            engine_version=version("mlx-lm"),
            effective=effective_of(
                contract,
                msgspec.convert(read_attention(model), Attention),
                read_positions(model),
                self._assigned.compute_dtype,
            ),
            http_port=http_port,
            data_port=data_port,
            terms=terms_of(contract, prefill_step_tokens=engine.cli_args.prefill_step_size),
        )

    def _died(self, error: BaseException) -> None:
        log.critical("the engine loop ended", exc_info=error)
        sys.stderr.write(f"error: the engine stopped: {type(error).__name__}: {error}\n")
        _leave(1)


def _leave(code: int) -> None:
    """Ends the process without waiting for threads that may be inside the engine."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise Stopped


def main() -> None:
    sys.setswitchinterval(THREAD_SWITCH_S)
    warnings.filterwarnings("ignore", module="mlx_lm")
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    try:
        # a model's "~" is this host's home; the library would look for it on a hub
        sys.argv = [os.path.expanduser(argument) for argument in sys.argv]
        replica = Replica()
        replica.attach()
        library.run = replica.serve
        library.main()
    except Stopped:
        replica.stop()
    except (PdctlError, OSError) as error:
        hint = getattr(error, "hint", None)
        sys.stderr.write(f"error: {error}\n" + (f"\nhint: {hint}\n" if hint else ""))
        _leave(LaunchError.exit_code)


if __name__ == "__main__":
    main()
