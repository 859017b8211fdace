"""What this machine is: versions, memory, disk, clock, accelerators.

    python -m pdctl.runtime.hosts.facts      prints one JSON `HostFacts`

so that another interpreter of the same machine can be asked what it is.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata

import msgspec
import psutil

from pdctl import __version__
from pdctl.runtime.hosts.survey import Device, HostFacts
from pdctl.runtime.machine.boot import boot_id
from pdctl.runtime.machine.folders import nearest, state_home

DEVICES_S = 5.0
"""nvidia-smi hangs where a driver is broken: no device is known then."""
QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
)


def host_facts() -> HostFacts:
    """Everything at this moment. Raises OSError where the state's file system can't be read."""
    home = state_home()
    devices = nvidia_devices()
    return HostFacts(
        pdctl_version=__version__,
        python=sys.executable,
        python_version=platform.python_version(),
        xoscar_version=_version_of("xoscar"),
        uid=os.getuid(),
        state_home=os.fspath(home),
        boot=boot_id(),
        clock_s=time.time(),
        memory_free_bytes=psutil.virtual_memory().available,
        disk_free_bytes=shutil.disk_usage(nearest(home)).free,
        devices=devices,
    )


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvidia_devices() -> tuple[Device, ...]:
    """The NVIDIA devices that the driver shows; none where it is absent, broken or stuck."""
    try:
        asked = subprocess.run(
            QUERY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEVICES_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_devices(asked.stdout)


def parse_devices(text: str) -> tuple[Device, ...]:
    """From nvidia-smi's CSV (sizes in MiB). A device that shares the machine's memory tells no
    size: left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not all(fields[i].isdigit() for i in (0, 2, 3)):
            continue
        index, name, total, free = fields
        found.append(
            Device(
                index=int(index),
                name=name,
                total_bytes=int(total) << 20,
                free_bytes=int(free) << 20,
            )
        )
    return tuple(found)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(host_facts()))
