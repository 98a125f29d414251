"""Where in a user's program an instruction comes from, as the metadata of HLO text says.

An instruction names a frame of a table in front of the program: a line of a file, and the frame that called it. Older text has
the file and the line in the instruction itself. JAX leaves its own frames out.
"""

import functools
import pathlib
import re

_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_LINE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"\s+source_line=(\d+)')
_ENTRY = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_INSTALLED = re.compile(r"/(?:site-packages|dist-packages)/")
_PACKAGE = f"{pathlib.Path(__file__).resolve().parents[1]}/"


class Sources:
    """Holds the tables of file names, lines and stack frames of a program.

    Args:
        text: of one HLO module.
    """

    def __init__(self, text: str):
        self._text = text

    @functools.cached_property
    def known(self) -> bool:
        """Returns whether any instruction of the program says where it comes from."""
        return _FRAME.search(self._text) is not None or _LINE.search(self._text) is not None

    def of(self, metadata: str) -> tuple[str, ...]:
        """Returns the lines that led to an instruction, such as ``/home/me/train.py:40``, the innermost first."""
        if line := _LINE.search(metadata):
            return (f"{line[1]}:{line[2]}",)
        match = _FRAME.search(metadata)
        return self._lines(int(match[1])) if match else ()

    @functools.cached_property
    def _frames(self) -> dict[int, dict[str, int]]:
        return {number: _fields(entry) for number, entry in self._table("StackFrames").items()}

    @functools.cached_property
    def _places(self) -> dict[int, str]:
        files, places = self._table("FileNames"), {}
        for number, entry in self._table("FileLocations").items():
            fields = _fields(entry)
            if name := files.get(fields.get("file_name_id", 0), "").strip('"'):
                places[number] = f"{name}:{fields.get('line', 0)}"
        return places

    def _table(self, name: str) -> dict[int, str]:
        found = re.search(rf"^{name}\n((?:\d+ .*\n)+)", self._text, re.MULTILINE)
        return {int(number): entry for number, entry in _ENTRY.findall(found[1])} if found else {}

    def _lines(self, frame: int) -> tuple[str, ...]:
        # A frame comes after the one that called it, so the first has no caller. What it says is what stands for none: its own
        # number, where callers count from 2.
        none = self._frames.get(1, {}).get("parent_frame_id", 0)
        lines = []
        while (fields := self._frames.get(frame)) is not None:
            if place := self._places.get(fields.get("file_location_id", 0)):
                lines.append(place)
            caller = fields.get("parent_frame_id", none) - none
            if caller >= frame:
                break
            frame = caller
        return tuple(lines)


def own_line(lines: tuple[str, ...]) -> str:
    """Returns the innermost line outside of installed packages and of this one, or else the innermost; empty without any."""
    own = (line for line in lines if not _INSTALLED.search(line) and not line.startswith(_PACKAGE))
    return next(own, lines[0] if lines else "")


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
