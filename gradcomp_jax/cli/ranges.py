"""Ranges of options: declared beside the option, said by its help, and checked before a command begins."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

from typer.models import OptionInfo

from gradcomp_jax._checks import Range
from gradcomp_jax.cli.user_errors import user_errors

SEED = Range(0, 2**32 - 1)
"""As many seeds give different keys."""
SEEDS = Range(1, 1_000)
SECONDS = Range(1, 604_800, whole=False)
"""Up to a week."""
HEARTBEAT = Range(1, 86_400)
"""Up to a day."""
PROCESSES = Range(1, 65_536)
PROCESS = Range(0, PROCESSES.most - 1)
EVERY = Range(0, 1_000_000)
"""Steps; 0 for never."""
PLANNED = Range(1, 1_000_000)
"""Devices of a cluster that is only planned for."""


def with_ranges(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command that refuses what is outside of the :class:`Range` in an option's ``Annotated``.

    The help of the option says the range. ``ranges`` of the command that is returned are all of them, by parameter.
    """
    ranges: dict[str, Range] = {}
    parameters = []
    signature = inspect.signature(command)
    for name, parameter in signature.parameters.items():
        kind, *facts = get_args(parameter.annotation) or (parameter.annotation,)
        found = [fact for fact in facts if isinstance(fact, Range)]
        if found:
            option = copy.copy(next(fact for fact in facts if isinstance(fact, OptionInfo)))
            (ranges[name],) = found
            option.help = f"{str(option.help).removesuffix('.')}; {ranges[name]}."
            parameter = parameter.replace(annotation=Annotated[kind, option])
        parameters.append(parameter)

    @functools.wraps(command)
    def called(**given: Any) -> None:
        with user_errors():
            for name, allowed in ranges.items():
                if given[name] is not None:
                    allowed.check(spelled(name), given[name])
        command(**given)

    called.ranges = ranges  # type: ignore[attr-defined]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def spelled(name: str) -> str:
    """Returns the option of a parameter."""
    return f"--{name.replace('_', '-')}"


def unparsed(error: Any) -> str:
    """Returns the sentence on words that are no value of their option.

    Args:
      error: typer's ``BadParameter``.
    """
    if error.param is None or error.ctx is None:
        return str(error.format_message())
    allowed = getattr(error.ctx.command.callback, "ranges", {}).get(error.param.name)
    return f"{error.param.opts[0]}" + (f": {error.message}" if allowed is None else f" must be {allowed}")
