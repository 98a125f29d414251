"""A digest differs where a bit does, and names the first step at which copies part."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp_jax._errors import SettingError
from gradcomp_jax.distributed import Verifier, digest

KINDS = ("float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn", "int4")


def values(kind: str) -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 2, 60) if kind in ("bool", "int4") else np.arange(60)
    return bits.astype(np.dtype(getattr(ml_dtypes, kind, kind)))


def test_every_entry_its_place_shape_and_dtype_count() -> None:
    plain = {kind: values(kind) for kind in KINDS}
    moved = {kind: np.roll(value, 1) for kind, value in plain.items()}
    changed = {kind: value.copy() for kind, value in plain.items()}
    for kind, value in changed.items():
        value[-1] = 1 - int(value[-1].real) if kind in ("bool", "int4") else value[-2]
    first, again, rolled, other = (digest(tree) for tree in (plain, dict(plain), moved, changed))
    assert first == again and len(first) == len(KINDS)
    for name in first:
        assert first[name] != rolled[name], name
        assert first[name] != other[name], name
    # A NaN of other bits, and the sign of a zero.
    four = np.asarray([0x7FC00000, 0x7FC00001, 0, 0x80000000], np.uint32).view(np.float32)
    found = digest([four[:1], four[1:2], four[2:3], four[3:].reshape(1, 1)])
    assert len({*found.values()}) == 4
    assert list(found)[2:] == ["[2] (float32[1])", "[3] (float32[1, 1])"]


def copies(mesh, *leaves: np.ndarray, faulty: int | None = None):
    """Arrays that claim to be replicated; one device's copy of the last one has another bit."""
    sharding = NamedSharding(mesh, P())
    found = []
    for place, leaf in enumerate(leaves):
        parts = []
        for index, device in enumerate(mesh.devices.flat):
            copy = leaf.copy()
            if index == faulty and place == len(leaves) - 1:
                copy.view(np.uint32)[3] ^= 1
            parts.append(jax.device_put(copy, device))
        found.append(jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts))
    return {str(place): leaf for place, leaf in enumerate(found)}


def test_the_first_step_at_which_devices_part_is_named(mesh8) -> None:
    verifier = Verifier(mesh8, every=4)
    a, b = np.ones(16, np.float32), np.linspace(0, 1, 16, dtype=np.float32)
    for step in range(1, 7):
        verifier.after_step(step, copies(mesh8, a, b))
    verifier.after_step(7, copies(mesh8, a, b, faulty=5))
    with pytest.raises(
        SettingError, match=r"differ from step 7 on: \['1'\] is \w{8} on device 0 and \w{8} on device 5"
    ):
        verifier.after_step(8, copies(mesh8, a, b, faulty=5))


def test_what_is_left_is_compared_when_asked_and_nothing_where_it_is_off(mesh8) -> None:
    a = np.ones(16, np.float32)
    verifier = Verifier(mesh8, every=1000)
    verifier.after_step(3, copies(mesh8, a, a, faulty=7))
    with pytest.raises(SettingError, match="differ from step 3 on"):
        verifier.check()
    verifier.check()
    off = Verifier(mesh8, every=0)
    off.after_step(1, copies(mesh8, a, a, faulty=7))
    off.check()
