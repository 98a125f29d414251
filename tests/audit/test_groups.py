"""Every syntax of replica_groups, and the rules that turn ids into devices."""

import numpy as np
import pytest

from gradcomp_jax.audit.groups import connected, device_groups, parse_groups
from gradcomp_jax.audit.hlo import parse_module

SYNTAXES = [
    ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
    ("{{0,4,1},{2}}", ((0, 4, 1), (2,))),
    ("{}", ()),
    ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['x'=2,'y'=2,'z'=2] {'z','x'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
    ("mesh['one'=1,'w'=4] {'one','w'}", ((0, 1, 2, 3),)),
    ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}", ((0, 1), (2, 3))),
    ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}", ((0, 1), (2, 3))),
    # The middle and the minor part of an axis of 8, and the same as older versions print it.
    ("mesh['w'=8] {'w':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("mesh['w'=8] {'w':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ("@mesh<a=2,w=4> {w:(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
]


@pytest.mark.parametrize(("text", "groups"), SYNTAXES)
def test_syntax_is_read(text, groups):
    assert parse_groups(text) == groups


@pytest.mark.parametrize("text", ["[8]", "{0,1}", "mesh['a'=2] {'b'}", "mesh['w'=6] {'w':(2)2}", "all"])
def test_an_unknown_syntax_is_an_error(text):
    with pytest.raises(ValueError):
        parse_groups(text)


def test_iota_is_numpy_reshape_and_transpose():
    expected = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).reshape(6, 4)
    assert parse_groups("[6,4]<=[2,3,4]T(2,0,1)") == tuple(map(tuple, expected.tolist()))


HEADER = "HloModule m, replica_count=2, num_partitions=3\n\nENTRY %e (x: f32[4]) -> f32[4] {\n"
PER_PARTITION = ((0, 3), (1, 4), (2, 5))
PER_REPLICA = ((0, 1, 2), (3, 4, 5))
EVERYBODY = (tuple(range(6)),)


@pytest.mark.parametrize(
    ("kind", "attributes", "groups"),
    [
        # Without a channel, ids are replicas, and each partition has its own group.
        ("all-reduce", "replica_groups={}", PER_PARTITION),
        ("all-reduce", "replica_groups={{0,1}}", PER_PARTITION),
        ("all-reduce", "to_apply=%add", PER_PARTITION),
        ("all-to-all", "replica_groups={{0},{1}}", tuple((i,) for i in range(6))),
        # With a channel, replicas of all partitions take part together.
        ("all-reduce", "channel_id=1, replica_groups={}", EVERYBODY),
        ("all-gather", "channel_id=1, replica_groups={{0},{1}}", PER_REPLICA),
        # All-to-all and broadcast: with a channel, ids are partitions.
        ("all-to-all", "channel_id=1, replica_groups={}", PER_REPLICA),
        ("collective-broadcast", "channel_id=1, replica_groups={{0,2}}", ((0, 2), (3, 5))),
        # Flattened ids.
        (
            "all-reduce",
            "channel_id=1, replica_groups={{0,5},{1,2,3,4}}, use_global_device_ids=true",
            ((0, 5), (1, 2, 3, 4)),
        ),
        ("all-gather", "channel_id=1, replica_groups={}, use_global_device_ids=true", EVERYBODY),
    ],
)
def test_ids_become_devices(kind, attributes, groups):
    module = parse_module(HEADER + f"  ROOT %c = f32[4] {kind}(f32[4] %x), {attributes}\n}}\n")
    assert device_groups(module.entry.root, kind, module) == groups


def test_an_error_names_the_instruction():
    line = "  ROOT %odd.7 = f32[4] all-reduce(f32[4] %x), replica_groups=everyone\n}\n"
    module = parse_module(HEADER + line)
    with pytest.raises(ValueError, match=r"'everyone', in the HLO instruction odd\.7"):
        device_groups(module.entry.root, "all-reduce", module)


def test_device_ids_after_a_mesh_belong_to_the_groups():
    attributes = "replica_groups=mesh['x'=3,'y'=2], device_ids=(0,2,4,1,3,5) {'y'}"
    line = f"  ROOT %c = f32[4] all-reduce(f32[4] %x), channel_id=1, {attributes}, "
    module = parse_module(HEADER + line + "use_global_device_ids=true\n}\n")
    assert device_groups(module.entry.root, "all-reduce", module) == ((0, 2), (1, 4), (3, 5))


def test_pairs_join_devices():
    assert connected(((0, 1), (1, 2), (5, 4), (6, 6))) == ((0, 1, 2), (4, 5), (6,))
    assert connected(()) == ()
