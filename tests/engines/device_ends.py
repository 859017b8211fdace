"""What both ends of a handoff between devices are opened with."""

from __future__ import annotations

from handoff.ends import DIGEST, KEY, WAIT_S
from handoff.test_nixl import GEOMETRY

from pdctl.handoff.identity import Identity
from pdctl.handoff.opening import Opening
from pdctl.topology.model import Transport


def opening(*, sends: bool) -> Opening:
    return Opening(
        identity=Identity("p0" if sends else "d0", KEY, DIGEST),
        geometry=GEOMETRY,
        sends=sends,
        timeout_s=WAIT_S,
        buffer_bytes=64 << 20,
        transports=dict.fromkeys(("p0", "d0"), Transport.NIXL),
        on_device=True,
    )
