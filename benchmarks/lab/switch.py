"""The switch in user space: compiled where it runs, told what to do by lines of text."""

import contextlib
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

from .shell import run


class Switch:
    """Passes packets between the tun devices called ``device`` of some namespaces."""

    def __init__(self, device: str, namespaces: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="switch-") as folder:
            program = str(pathlib.Path(folder) / "switch")
            run("cc", "-O2", "-o", program, str(pathlib.Path(__file__).with_name("switch.c")))
            paths = [f"/run/netns/{name}" for name in namespaces]
            self._process = subprocess.Popen(
                [program, device, *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
                # Ctrl-C is for the program that uses the laboratory, which then closes it.
                start_new_session=True,
            )
            self._answer("start")

    def shape(self, worker: int, rate: float | None, delay_s: float) -> None:
        self._tell(f"shape {worker} {round(rate or 0)} {round(delay_s * 1e9)}")

    def link(self, worker: int, *, up: bool) -> None:
        self._tell(f"link {worker} {int(up)}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Where the switch has gone, _answer says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
        self._answer(line)

    def _answer(self, to: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ok\n":
            self._process.kill()
            _, error = self._process.communicate()
            raise OSError(f"the switch failed at {to!r}: {error.strip()}")
