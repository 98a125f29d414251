"""What the collectives of a compiled program wait for."""

from collections.abc import Collection

from gradcomp_jax.audit.hlo import parse_module

COLLECTIVES = ("all-reduce", "all-to-all", "all-gather", "collective-permute", "reduce-scatter")


def waits_for(program: str, parameters: Collection[int], *, least_bytes: int = 0) -> list[bool]:
    """For each collective, or loop with some in it, whether it needs, by any way, one of these parameters.

    Args:
        program: the text of an optimized module.
        parameters: their numbers; negative ones count from the last.
        least_bytes: collectives of less are left out.
    """
    module = parse_module(program)
    entry = module.entry.instructions.values()
    last = sum(one.opcode == "parameter" for one in entry)
    numbers = {n % last for n in parameters}
    reached: set[str] = set()
    found = []

    def communicates(one) -> bool:
        if one.opcode == "while":
            body = module.computation(one.attributes["body"].lstrip("%"))
            return any(communicates(inside) for inside in body.instructions.values())
        large = sum(shape.bytes for shape in one.shapes) >= least_bytes
        return large and one.opcode.removesuffix("-start") in COLLECTIVES

    for one in entry:
        if one.opcode == "parameter":
            needs = int(one.operands_text) in numbers
        else:
            needs = any(name in reached for name in one.operand_names)
        if needs:
            reached.add(one.name)
        if communicates(one):
            found.append(needs)
    assert found, "no collective was found"
    return found
