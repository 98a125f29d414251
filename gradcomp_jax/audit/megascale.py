"""Collectives across TPU slices, which the compiler writes as a send and a recv to the host.

The send names the collective that the hosts carry out and its devices, by their hardware ids:
slice 1 holds 100000, 100001 and so on. The number of bytes is known only with these: in an
all-gather of four slices a device hands its shard over once, and three copies cross the network.
"""

import re

from gradcomp_jax.audit.groups import Groups, connected, normalised
from gradcomp_jax.audit.hlo import Instruction
from gradcomp_jax.audit.syntax import parse_int_lists

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
    "ONE_TO_ONE": "collective-permute",
}
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
_SLICE = 100_000
_TYPE, _TARGET = "_xla_megascale_transfer_type", "_xla_megascale_target"
_HANDLER, _RENDEZVOUS = "_xla_host_transfer_handler_name", "_xla_host_transfer_rendezvous"


def is_megascale(instruction: Instruction) -> bool:
    """Returns whether a send or recv belongs to a collective across slices."""
    attributes = instruction.frontend_attributes
    return _TYPE in attributes or "megascale" in attributes.get(_HANDLER, "")


def rendezvous(instruction: Instruction) -> str:
    """Returns the name that a send and its recv share."""
    return instruction.frontend_attributes.get(_RENDEZVOUS, "")


def kind_and_groups(instruction: Instruction) -> tuple[str, Groups]:
    """Reads what the hosts do with a transfer.

    Returns:
        The kind, and the groups of hardware ids.

    Raises:
        ValueError: if the transfer type or the targets are not known.
    """
    attributes = instruction.frontend_attributes
    kind = _KINDS.get(attributes.get(_TYPE, ""))
    target = attributes.get(_TARGET, "").replace(" ", "")
    if kind is None:
        raise ValueError(
            f"{instruction.name} is a transfer between slices of unknown type "
            f"{attributes.get(_TYPE)!r}: teach gradcomp_jax.audit.megascale its cost"
        )
    try:
        if product := _PRODUCT.fullmatch(target):
            slices, devices = _ranges(product[1]), _ranges(product[2])
            groups = [tuple(s * _SLICE + d for s in slices) for d in devices]
            return kind, normalised(groups)
        lists = parse_int_lists(target.replace("->", ","))
    except ValueError as error:
        raise ValueError(f"targets of {instruction.name} not understood: {error}") from error
    return kind, connected(lists) if kind == "collective-permute" else normalised(lists)


def _ranges(text: str) -> list[int]:
    """Reads ``1,3:5``: 1, 3, 4, 5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
