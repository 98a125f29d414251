"""A comparison of the kernels for TPU with plain NumPy, bit for bit, on the first TPU that they would run on."""

import functools
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax.kernels import dealt_on_tpu
from gradcomp_jax.kernels.dealing import Deal

_DEAL, _WIDTH, _LOW_BITS = Deal(64 * 1024, 64, 1025), 256, 7
"""A matrix of a few tiles, whose rows go around the table, with entries beyond its end."""
_STRETCHES = 4


@functools.cache
def passed() -> bool:
    """Returns whether the kernels return on this process's TPU what they should; warns once if they do not."""
    found: list[str] = []
    # A thread of its own, because the caller may be tracing, under an axis.
    thread = threading.Thread(target=lambda: found.append(difference()))
    thread.start()
    thread.join()
    if found != [""]:
        warnings.warn(
            f"kernels of Pallas are not used on this TPU ({jax.devices()[0].device_kind}): {(found or ['no result'])[0]}."
            f" XLA's own programs are used, which are slower. Please report it. {dealt_on_tpu.SWITCH}=0 silences this;"
            " set it in all processes of a run, which must have one program.",
            RuntimeWarning,
            stacklevel=2,
        )
    return found == [""]


def difference(*, interpret: bool = False) -> str:
    """Returns where kernels differ from NumPy, or what they raise; an empty text where they agree in every bit."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, _DEAL.size)).astype(np.float32)
    x[:: _DEAL.rows], x[3], x[4] = 0, np.nan, -np.inf
    index = rng.permuted(np.tile(np.arange(64, dtype=np.int32), (_DEAL.rows, 1)), axis=1)[:, :2]
    value = rng.standard_normal(index.shape).astype(np.float32)
    try:
        found = jax.device_get(jax.jit(functools.partial(_by_kernels, interpret=interpret))(x, y, index, value))
    except Exception as error:  # Whatever a compiler raises, there is another way.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for name, wanted in _expected(x, y, index, value).items():
        if found[name].tobytes() != wanted.tobytes():
            return f"{name} differs in {np.count_nonzero(found[name].view(wanted.dtype) != wanted)} of {wanted.size} entries"
    return ""


def _by_kernels(x: Any, y: Any, index: Any, value: Any, interpret: bool) -> dict[str, Any]:
    best = functools.partial(dealt_on_tpu.best_of_dealt, deal=_DEAL, low_bits=_LOW_BITS, interpret=interpret)
    place = functools.partial(dealt_on_tpu.placed_in_matrix, deal=_DEAL, width=_WIDTH, interpret=interpret)
    matrix = x.reshape(-1, _WIDTH)
    parts = dealt_on_tpu.Parts((matrix, y.reshape(-1, _WIDTH)), jnp.subtract)
    half = value.astype(jnp.bfloat16)
    return {
        "the best of each block": best(dealt_on_tpu.Parts((matrix,))).reshape(-1)[: _DEAL.rows],
        "the best of each run": best(parts, lines=8, apart=2).reshape(_STRETCHES, -1)[:, : 2 * _DEAL.rows],
        "one entry of each block": place(index[:, :1], half[:, :1]),
        "two entries of each block": place(index, half, dtype=jnp.float32),
        "entries in float32": place(index[:, :1], value[:, :1]),
    }


def _expected(x: Any, y: Any, index: Any, value: Any) -> dict[str, Any]:
    place = np.arange(_DEAL.size)
    block, line = place % _DEAL.rows, (place // _DEAL.rows).astype(np.int32)

    def best(entries: np.ndarray, stretches: int, apart: int = 1) -> np.ndarray:
        bits = entries.view(np.int32)
        negative = (entries.view(np.uint32) >> 31).view(np.int32)
        keys = (bits & np.int32(0x7FFFFFFF & -(1 << _LOW_BITS))) | (line << 1) | negative
        result = np.full((stretches, apart * _DEAL.rows), -1, np.int32)
        np.maximum.at(result, (place * stretches // _DEAL.size, line % apart * _DEAL.rows + block), keys)
        return result

    # Beyond the end of the vector the last line has zeros.
    beyond = np.where((_DEAL.block - 1) * _DEAL.rows + np.arange(_DEAL.rows) >= _DEAL.size, (_DEAL.block - 1) << 1, -1)

    def placed(count: int, dtype: Any) -> np.ndarray:
        matrix = np.zeros(_DEAL.block * _DEAL.rows, dtype)
        for j in range(count):
            matrix[index[:, j] * _DEAL.rows + np.arange(_DEAL.rows)] = value[:, j].astype(dtype)
        return matrix[: _DEAL.size].reshape(-1, _WIDTH)

    return {
        "the best of each block": np.maximum(best(x, 1)[0], beyond.astype(np.int32)),
        "the best of each run": best(x - y, _STRETCHES, 2),
        "one entry of each block": placed(1, jnp.bfloat16),
        "two entries of each block": placed(2, jnp.bfloat16).astype(np.float32),
        "entries in float32": placed(1, np.float32),
    }
