"""Every way that pages can take, for fixtures that make one."""

from __future__ import annotations

import pytest
from handoff.reaches import READS
from handoff.secure import encrypted

from pdctl.handoff.transport.memory import MemoryTransport
from pdctl.handoff.transport.tcp import TcpTransport

SENDS = [
    pytest.param(MemoryTransport, id="memory"),
    pytest.param(TcpTransport, id="tcp"),
    pytest.param(encrypted, id="tls"),
]
TRANSPORTS = [*SENDS, *READS]
