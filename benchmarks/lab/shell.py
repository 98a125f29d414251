"""Commands of iproute2, and what is left of laboratories whose process has gone."""

import os
import pathlib
import shutil
import subprocess

PREFIX = "gclab"
FILES = pathlib.Path("/etc/netns")


def ip(*words: str) -> str:
    return run("ip", *words)


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip() or done.returncode}")
    return done.stdout


def namespaces() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()]


def remove(namespace: str) -> None:
    """Takes the namespace's interfaces with it."""
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
    shutil.rmtree(FILES / namespace, ignore_errors=True)


def remove_stale() -> None:
    """Removes what a process that was killed has left. Names hold the number of the process that made them."""
    left = set(namespaces())
    if FILES.is_dir():
        left |= {entry.name for entry in FILES.iterdir()}
    for name in left:
        prefix, _, rest = name.partition("-")
        maker = rest.partition("-")[0]
        if prefix == PREFIX and maker.isdigit() and not _alive(int(maker)):
            remove(name)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
