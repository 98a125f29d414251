"""Recognises the instructions that move data between devices.

An instruction that looks like communication and is not recognised is an error: an incomplete report is worse than none.
"""

import dataclasses
import re

from gradcomp_jax._costs import KINDS
from gradcomp_jax.audit import megascale
from gradcomp_jax.audit.groups import Groups, connected, device_groups
from gradcomp_jax.audit.hlo import Computation, Instruction, Module
from gradcomp_jax.audit.shapes import ArrayShape
from gradcomp_jax.audit.syntax import parse_int_lists

# The group size of a transfer between two devices that the text does not name.
_POINT_TO_POINT = 2
_SUSPECT_OPCODE = re.compile(r"(?:^|-)(?:all-|reduce-scatter|collective|send|recv|permute)", re.IGNORECASE)
_SUSPECT_TARGET = re.compile(
    r"nccl|rccl|nvshmem|megascale|collective|(?:^|_)mpi|"
    r"all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|ppermute",
    re.IGNORECASE,
)
# The configuration of a kernel says whether the kernel itself communicates with other devices.
_KERNEL_COMMUNICATES = re.compile(r'"has_communication"\s*:\s*true')
# Markers inside a computation whose collective is counted on its own.
_MARKERS = ("AsyncCollectiveStart", "AsyncCollectiveDone")
_CONTINUED = '"async_collective_fusion_config"'
_SCATTER_FUSION = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Describes one execution of an instruction that moves data.

    Attributes:
        kind: the operation, ``"all-gather"`` for instance.
        groups: the devices that take part together; ``()`` if the text does not say.
        group_size: devices of the largest group; 1 if nothing leaves its device.
        by_dtype: operand bytes that one device puts in, per HLO element type.
        sends: whether the instruction sends.
        receives: whether it receives.
        hardware_ids: whether ``groups`` hold hardware ids rather than device numbers.
    """

    kind: str
    groups: Groups
    group_size: int
    by_dtype: dict[str, int]
    sends: bool = True
    receives: bool = True
    hardware_ids: bool = False


def base_opcode(instruction: Instruction) -> str:
    """Returns the opcode without ``-start``."""
    return instruction.opcode.removesuffix("-start")


def is_later_half(instruction: Instruction) -> bool:
    """Returns whether an instruction only waits for another one, which is counted where it starts."""
    return instruction.opcode.endswith(("-done", "-update"))


def transfer_of(instruction: Instruction, computation: Computation, module: Module) -> Transfer | None:
    """Returns what an instruction moves by itself; None if it moves nothing.

    Raises:
        ValueError: if the instruction looks like communication and is not known.
    """
    opcode = base_opcode(instruction)
    if is_later_half(instruction):
        return None
    if opcode in KINDS:
        return _collective(instruction, opcode, computation, module)
    if opcode in ("send", "recv"):
        return _point_to_point(instruction, opcode, computation, module)
    if opcode == "custom-call":
        _check_custom_call(instruction)
    elif opcode == "ragged-all-to-all":
        raise ValueError(
            f"{instruction.name} is a ragged-all-to-all: its sizes are known only when it runs; "
            "use an all_to_all of padded rows to have its bytes counted"
        )
    elif _SUSPECT_OPCODE.search(opcode):
        raise ValueError(
            f"{instruction.name} has opcode {instruction.opcode!r}, which looks like communication "
            "and is not known: teach gradcomp_jax.audit.collectives its cost"
        )
    return None


def _collective(instruction: Instruction, kind: str, computation: Computation, module: Module) -> Transfer | None:
    if _is_continuation(instruction, computation, module):
        return None
    by_dtype = _bytes_by_dtype(instruction, computation)
    if kind == "collective-permute":
        return _permute(instruction, by_dtype)
    groups = device_groups(instruction, kind, module)
    size = _largest(groups)
    if kind == "all-reduce" and computation.name.startswith(_SCATTER_FUSION):
        # TPU writes a reduce-scatter as a fusion of an all-reduce and the slice each device keeps.
        kind = "reduce-scatter"
    _check_gathered(instruction, kind, size, computation)
    return Transfer(kind, groups, size, by_dtype)


def _permute(instruction: Instruction, by_dtype: dict[str, int]) -> Transfer:
    if "slice_sizes" in instruction.attributes:
        raise ValueError(
            f"{instruction.name} is a collective-permute of slices in place, which is not counted: permute whole arrays"
        )
    pairs = parse_int_lists(instruction.attributes.get("source_target_pairs", "{}"))
    groups = connected(pairs)
    return Transfer("collective-permute", groups, _largest(groups), by_dtype)


def _largest(groups: Groups) -> int:
    """Returns the size of the largest group; a device that is its own target is a group of one."""
    return max((len(group) for group in groups), default=1)


def _point_to_point(instruction: Instruction, opcode: str, computation: Computation, module: Module) -> Transfer | None:
    if megascale.is_megascale(instruction):
        sends = module.by_opcode.get("send", ())
        if opcode == "recv":
            if megascale.rendezvous(instruction) in map(megascale.rendezvous, sends):
                # The send says what both halves of the collective move.
                return None
            raise ValueError(f"{instruction.name} receives from other slices, but nothing is sent")
        kind, groups = megascale.kind_and_groups(instruction)
        by_dtype = _bytes_by_dtype(instruction, computation)
        return Transfer(kind, groups, _largest(groups), by_dtype, hardware_ids=True)
    # The result of a recv is (data, context, token), and the data may be several arrays.
    sending = opcode == "send"
    by_dtype = _bytes_by_dtype(instruction, computation) if sending else _sums(instruction.shapes[:-2])
    pairs = parse_int_lists(instruction.frontend_attributes.get("_xla_send_recv_source_target_pairs", "{}"))
    groups = connected(pairs)
    to_host = instruction.attributes.get("is_host_transfer") == "true"
    return Transfer(
        kind=f"host-{opcode}" if to_host else opcode,
        groups=groups,
        group_size=_largest(groups) if pairs else _POINT_TO_POINT,
        by_dtype=by_dtype,
        sends=opcode == "send",
        receives=opcode == "recv",
    )


def _bytes_by_dtype(instruction: Instruction, computation: Computation) -> dict[str, int]:
    return _sums(computation.operand_shapes(instruction))


def _sums(arrays: tuple[ArrayShape, ...]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for array in arrays:
        if array.dtype != "token":
            totals[array.dtype] = totals.get(array.dtype, 0) + array.bytes
    return totals


def _is_continuation(instruction: Instruction, computation: Computation, module: Module) -> bool:
    """Returns whether a collective only continues one that another computation started.

    TPU may spread one collective over several fusions, and repeats the instruction in each. Only the
    one that an ``AsyncCollectiveStart`` consumes is counted.
    """
    if _CONTINUED not in instruction.attributes.get("backend_config", ""):
        return False
    starts = [
        call.operand_names
        for call in module.by_opcode.get("custom-call", ())
        if call.attributes.get("custom_call_target") == _MARKERS[0]
    ]
    if not starts:
        raise ValueError(
            f"{instruction.name} is a part of a fused collective whose start was not found: "
            "compile with xla_tpu_enable_async_collective_fusion=false"
        )
    # Names are unique in a module, so the operand shows which part is the start.
    return not any(instruction.name in names for names in starts)


def _check_gathered(instruction: Instruction, kind: str, size: int, computation: Computation) -> None:
    """Compares the group with the shapes, so that a wrongly read group does not pass unnoticed."""
    if kind != "all-gather" or instruction.opcode != kind:
        return
    shards = sum(array.elements for array in computation.operand_shapes(instruction))
    gathered = sum(array.elements for array in instruction.shapes)
    if gathered != size * shards:
        raise ValueError(
            f"{instruction.name} gathers {shards} elements into {gathered}, which does not fit "
            f"groups of {size}: its replica_groups were not understood"
        )


def _check_custom_call(instruction: Instruction) -> None:
    target = instruction.attributes.get("custom_call_target", "")
    if target in _MARKERS:
        return
    config = instruction.attributes.get("backend_config", "")
    if _SUSPECT_TARGET.search(target) or _KERNEL_COMMUNICATES.search(config):
        raise ValueError(
            f"{instruction.name} is a custom call of {target!r}, which communicates out of the "
            "compiler's sight: replace it by a collective of jax.lax to have its bytes counted"
        )
