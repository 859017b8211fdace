"""`python -m pdctl.runtime.router`: started by the agent, told everything over its socket."""

from __future__ import annotations

import logging
import os
import sys

import anyio

from pdctl.engines.channel import SOCKET_ENV
from pdctl.errors import PdctlError
from pdctl.runtime.router.server import serve


def main() -> int:
    """Exit code: 0 after a signal, the error's own otherwise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    path = os.environ.get(SOCKET_ENV)
    if not path:
        logging.getLogger("pdctl.router").error("%s is not set", SOCKET_ENV)
        return 2
    try:
        anyio.run(serve, path)
    except PdctlError as error:
        return _told(error)
    except BaseExceptionGroup as group:
        expected, rest = group.split(PdctlError)
        if rest is not None or expected is None:
            raise
        return _told(_first(expected))
    return 0


def _told(error: PdctlError) -> int:
    logging.getLogger("pdctl.router").error("%s", error.message)
    return error.exit_code


def _first(group: BaseExceptionGroup[PdctlError]) -> PdctlError:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


if __name__ == "__main__":
    sys.exit(main())
