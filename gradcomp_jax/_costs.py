"""What one device sends and receives in a collective: the bytes that :func:`gradcomp_jax.wire_bytes` counts.

A broadcast passes the array on from device to device, so that no device sends it more than once. These are lower bounds that
good implementations reach, so that two programs can be compared. A backend may choose another algorithm for a small array.

References: Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
"""

# The operand of an all-gather is a shard; that of every other collective is the full array.
_GATHER = "all-gather"
_SHARED = ("reduce-scatter", "all-to-all")
_ALL_REDUCE = "all-reduce"
_WHOLE = ("collective-permute", "collective-broadcast", "send", "recv", "host-send", "host-recv")

KINDS = (_ALL_REDUCE, _GATHER, *_SHARED, "collective-permute", "collective-broadcast")


def bytes_moved(kind: str, operand_bytes: int, group_size: int) -> int:
    """Returns the bytes that one device sends; it receives as many.

    Args:
        kind: the kind of collective, ``"all-reduce"`` for instance.
        operand_bytes: bytes that one device puts in; for an all-gather, its shard.
        group_size: devices that take part together; one device moves nothing.
    """
    if group_size <= 1:
        return 0
    if kind == _GATHER:
        return (group_size - 1) * operand_bytes
    if kind == _ALL_REDUCE:
        return -(-2 * (group_size - 1) * operand_bytes // group_size)
    if kind in _SHARED:
        return -(-(group_size - 1) * operand_bytes // group_size)
    if kind in _WHOLE:
        return operand_bytes
    raise ValueError(f"no formula for a collective of kind {kind!r}")
