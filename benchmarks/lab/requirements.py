"""What the laboratory needs from a machine, and what to do about it."""

import os
import pathlib
import shutil

_TOOLS = {
    "ip": "apt-get install -y iproute2",
    "tc": "apt-get install -y iproute2",
    "cc": "apt-get install -y gcc libc6-dev",
}


def available() -> str | None:
    """``None`` if :class:`~benchmarks.lab.Network` can be made here, else why not and what helps."""
    if os.uname().sysname != "Linux":
        return f"network namespaces are Linux's, and this is {os.uname().sysname}"
    for tool, remedy in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"there is no {tool}: {remedy}"
    if os.geteuid():
        return "network namespaces need root: run it with sudo, or in a container with --privileged"
    if not _may_administer():
        return "root here may not change networks (CAP_NET_ADMIN, CAP_SYS_ADMIN): run the container with --privileged"
    if not pathlib.Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun: modprobe tun, or run the container with --device /dev/net/tun"
    return None


def _may_administer() -> bool:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            held = int(line.split()[1], 16)
            return all(held >> capability & 1 for capability in (12, 21))  # CAP_NET_ADMIN, CAP_SYS_ADMIN
    return False
