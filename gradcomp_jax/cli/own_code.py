"""What a user's own module has: ``MODULE:NAME``."""

import importlib
import importlib.util
import os
import sys
from typing import Any

from gradcomp_jax._errors import SettingError, known_name, users_code


def imported(source: str, option: str = "--from") -> Any:
    """Imports what ``module:name`` names; the current folder comes first, as for ``python -m``. Errors name the option."""
    module, _, name = source.partition(":")
    if not module or not name or "/" in module:
        raise SettingError(f"{option} must be MODULE:NAME, such as my_module:make, got {source!r}")
    here = os.getcwd()
    # It stays there: a function may import its neighbours when it is called.
    if here not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        remedy = f"write {module.removesuffix('.py')}:{name}" if module.endswith(".py") else "check its name"
        raise SettingError(f"{option} {source}: there is no module {module} in {here} or installed: {remedy}")
    with users_code(f"{option} {source}", spec.origin):
        found: Any = importlib.import_module(module)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known_name(f"name in {module}", part, [n for n in vars(found) if not n.startswith("_")])
            raise
    return found
