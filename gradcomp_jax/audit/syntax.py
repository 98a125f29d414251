"""Splitting HLO text: brackets, quotes and commas.

Quoted strings hold JSON and debugging text with their own brackets, so a quoted string is one
atom here, whatever it contains.
"""

import re

_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(_STRING + r"|[()\[\]{},]")
_NAME = re.compile(r"[\w.\-]+")


def closing(text: str, start: int) -> int:
    """Returns the position of the bracket that closes the one at ``start``.

    Raises:
        ValueError: if no bracket closes it.
    """
    depth = 0
    for token in _TOKEN.finditer(text, start):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if depth == 0:
                return token.start()
    raise ValueError(f"no closing bracket in HLO text: {text[start : start + 80]!r}")


def split_commas(text: str) -> list[str]:
    """Splits at the commas that lie outside every bracket and string; empty pieces are left out."""
    pieces, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif token[0] == "," and depth == 0:
            pieces.append(text[begin : token.start()])
            begin = token.end()
    pieces.append(text[begin:])
    return [piece.strip() for piece in pieces if piece.strip()]


def parse_attributes(text: str) -> dict[str, str]:
    """Reads ``key=value, key=value``; the outer quotes of a quoted value are removed."""
    attributes = {}
    for piece in split_commas(text):
        key, equals, value = piece.partition("=")
        if equals:
            attributes[key.strip()] = _unquoted(value.strip())
    return attributes


def parse_names(text: str) -> list[str]:
    """Reads ``%a`` or ``{%a, %b}``: the names of computations."""
    return _NAME.findall(text)


def parse_int_lists(text: str) -> tuple[tuple[int, ...], ...]:
    """Reads ``{{0,1},{2,3}}``; ``{}`` gives ``()``.

    Raises:
        ValueError: if the text has another form.
    """
    compact = re.sub(r"\s", "", text)
    if not re.fullmatch(r"\{(\{[\d,]*\},?)*\}", compact):
        raise ValueError(f"expected lists of integers such as {{{{0,1}},{{2,3}}}}, got {text!r}")
    inner = re.findall(r"\{([\d,]*)\}", compact[1:-1])
    return tuple(tuple(int(n) for n in group.split(",") if n) for group in inner)


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value
