"""The audit of HLO text in forms that a CPU program does not have."""

import types

import numpy as np
import pytest

from gradcomp_jax.audit import wire_bytes
from gradcomp_jax.audit.shapes import ArrayShape, parse_shape
from gradcomp_jax.audit.sources import own_line

GROUPS = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"


def program(*lines, before="", devices=8):
    """The text of a module whose entry holds these instructions after %x = f32[16,8]."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule jit_f, is_scheduled=true, num_partitions={devices}\n\n"
        'FileNames\n1 "f.py"\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n'
        f"{before}\n"
        "ENTRY %main.1_spmd (x: f32[16,8]) -> f32[16,8] {\n"
        "  %x = f32[16,8]{1,0:T(8,128)} parameter(0), sharding={devices=[8,1]<=[8]}\n"
        f"{body}\n}}\n"
    )


def only_row(text, **arguments):
    rows = wire_bytes(text, **arguments).rows
    assert len(rows) == 1, rows
    return rows[0]


M = 16 * 8 * 4  # bytes of %x

START_FORMS = [
    pytest.param(
        "all-gather",
        [
            "%s = (f32[16,8]{1,0:T(8,128)}, f32[64,8]{1,0:T(8,128)S(1)}) "
            f"all-gather-start(%x), {GROUPS}, dimensions={{0}}",
            "ROOT %d = f32[64,8]{1,0:T(8,128)S(1)} all-gather-done(%s)",
        ],
        3 * M,
        id="all-gather",
    ),
    pytest.param(
        "all-reduce",
        [
            f"%s = f32[16,8]{{1,0}} all-reduce-start(%x), {GROUPS}, to_apply=%add",
            "ROOT %d = f32[16,8]{1,0} all-reduce-done(%s)",
        ],
        2 * 3 * M // 4,
        id="all-reduce",
    ),
    pytest.param(
        "collective-permute",
        [
            "%s = (f32[16,8]{1,0:T(8,128)}, f32[16,8]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, "
            "/*index=3*/u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, "
            "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            "ROOT %d = f32[16,8]{1,0} collective-permute-done(%s)",
        ],
        M,
        id="collective-permute",
    ),
    pytest.param(
        "all-to-all",
        [
            "%s = ((f32[16,8]{1,0}), f32[16,8]{1,0}, s32[]) all-to-all-start(%x), channel_id=1, "
            "replica_groups=[2,4]<=[8], dimensions={0}",
            "%u = ((f32[16,8]{1,0}), f32[16,8]{1,0}, s32[]) all-to-all-update(%s)",
            "ROOT %d = f32[16,8]{1,0} all-to-all-done(%u)",
        ],
        3 * M // 4,
        id="all-to-all",
    ),
]


@pytest.mark.parametrize(("kind", "lines", "sent"), START_FORMS)
def test_an_async_pair_counts_once(kind, lines, sent):
    row = only_row(program(*lines))
    assert (row.kind, row.name, row.dtype, row.group_size) == (kind, "s", "f32", 4)
    assert (row.operand_bytes, row.sent_bytes, row.received_bytes) == (M, sent, sent)


def test_a_generic_async_pair_counts_its_computation_once():
    before = (
        "%wrapped (p: f32[16,8]) -> f32[4,8] {\n"
        "  %p = f32[16,8]{1,0} parameter(0)\n"
        f"  ROOT %rs = f32[4,8]{{1,0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}, "
        "to_apply=%add\n}\n"
    )
    result = "((f32[16,8]{1,0}), f32[4,8]{1,0}, u32[])"
    lines = [
        f'%s = {result} async-start(%x), async_execution_thread="comm", calls=%wrapped',
        f"%u = {result} async-update(%s), calls=%wrapped",
        "ROOT %d = f32[4,8]{1,0} async-done(%u), calls=%wrapped",
    ]
    row = only_row(program(*lines, before=before))
    assert (row.kind, row.count, row.sent_bytes) == ("reduce-scatter", 1, 3 * M // 4)


def test_a_computation_of_another_core_ends_where_it_names_the_core():
    """As a TPU's sparse core: what follows is a computation of its own, and what is called there is found."""
    before = (
        "%scattered (p: f32[16,8]) -> f32[16,8] {\n  ROOT %p = f32[16,8] parameter(0)\n"
        '}, execution_thread="sparsecore"\n\n'
        "%called (q: f32[16,8]) -> f32[16,8] {\n  %q = f32[16,8] parameter(0)\n"
        f"  ROOT %ar = f32[16,8] all-reduce(%q), {GROUPS}, to_apply=%add\n}}\n"
    )
    lines = [
        '%s = ((f32[16,8]), f32[16,8], u32[]) call-start(%x), async_execution_thread="sparsecore", to_apply=%scattered',
        "%d = f32[16,8] call-done(%s)",
        "ROOT %r = f32[16,8] call(%d), to_apply=%called",
    ]
    row = only_row(program(*lines, before=before))
    assert (row.kind, row.count, row.operand_bytes) == ("all-reduce", 1, M)


def test_a_variadic_reduce_scatter_counts_every_operand():
    row = only_row(
        program(
            "%y = f32[4,4]{1,0} parameter(1)",
            "ROOT %rs = (f32[4,8]{1,0}, f32[1,4]{1,0}) reduce-scatter(%x, %y), "
            f"{GROUPS}, dimensions={{0}}, to_apply=%add",
        )
    )
    assert (row.operand_bytes, row.sent_bytes) == (M + 64, 3 * (M + 64) // 4)


def test_a_combined_all_gather_has_a_row_for_each_dtype():
    report = wire_bytes(
        program(
            "%y = u8[5]{0} parameter(1)",
            "%s = ((f32[16,8]{1,0}, u8[5]{0}), (f32[64,8]{1,0}, u8[20]{0})) "
            f"all-gather-start(%x, %y), {GROUPS}, dimensions={{0}}",
            "ROOT %d = (f32[64,8]{1,0}, u8[20]{0}) all-gather-done(%s)",
        )
    )
    assert {d: s.sent for d, s in report.by("dtype").items()} == {"f32": 3 * M, "u8": 15}


def test_older_text_has_shapes_before_its_operands_and_no_percent_signs():
    text = (
        "HloModule m, replica_count=4\n\nadd {\n  a = f32[] parameter(0)\n"
        "  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n\n"
        "ENTRY e {\n  x = f32[8]{0} parameter(0)\n"
        "  ROOT r = f32[8]{0} all-reduce(f32[8]{0} x), replica_groups={}, to_apply=add\n}\n"
    )
    assert (only_row(text).group_size, only_row(text).sent_bytes) == (4, 48)


def test_a_broadcast_passes_the_array_on():
    row = only_row(program("ROOT %b = f32[16,8] collective-broadcast(%x), channel_id=1, replica_groups={}"))
    assert (row.group_size, row.sent_bytes) == (8, M)


MEGASCALE = (
    "is_host_transfer=true, frontend_attributes={"
    '_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="r.1",%s}, '
    'backend_config={"debug":"\\n(a, {b\\"}"}'
)
PRODUCT = '_xla_megascale_target="{1,2,3,4}x{0:1}"'
LISTS = "_xla_megascale_target={{100000,200000,300000,400000},{100001,200001,300001,400001}}"
CHAIN = "_xla_megascale_target={{100000->200000},{200000->300000},{100001->200001}}"


@pytest.mark.parametrize(
    ("transfer", "target", "kind", "size", "sent"),
    [
        ("ALL_GATHER", PRODUCT, "all-gather", 4, 3 * M),
        ("ALL_REDUCE", PRODUCT, "all-reduce", 4, 2 * 3 * M // 4),
        ("ALL_TO_ALL", LISTS, "all-to-all", 4, 3 * M // 4),
        ("ONE_TO_ONE", CHAIN, "collective-permute", 3, M),
    ],
)
def test_a_collective_across_slices_is_counted_at_its_send(transfer, target, kind, size, sent):
    attributes = MEGASCALE % f'{target},_xla_megascale_transfer_type="{transfer}"'
    lines = [
        "%t = token[] after-all()",
        f"%send = (f32[16,8]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=2, {attributes}",
        f"%recv = (f32[64,8]{{1,0}}, u32[], token[]) recv(%t), channel_id=3, {attributes}",
        "%sd = token[] send-done(%send), channel_id=2, is_host_transfer=true",
        "%rd = (f32[64,8]{1,0}, token[]) recv-done(%recv), channel_id=3, is_host_transfer=true",
        "ROOT %g = f32[64,8]{1,0} get-tuple-element(%rd), index=0",
    ]
    # Four slices of two devices; the text is the program of one slice.
    devices = [types.SimpleNamespace(id=100_000 * (1 + s) + d, slice_index=s) for s in range(4) for d in range(2)]
    mesh = types.SimpleNamespace(axis_names=("s", "d"), devices=np.array(devices).reshape(4, 2))
    row = only_row(program(*lines, devices=2), mesh=mesh)
    assert (row.kind, row.group_size, row.axis, row.name) == (kind, size, ("s",), "send")
    assert (row.operand_bytes, row.sent_bytes, row.received_bytes) == (M, sent, sent)


def test_groups_in_the_program_of_one_slice_lie_in_that_slice():
    # The slice is the minor axis: the devices of the first slice are every second of the mesh.
    devices = [types.SimpleNamespace(id=100_000 * (1 + s) + d, slice_index=s) for d in range(4) for s in range(2)]
    array = np.array(devices).reshape(2, 2, 2)
    mesh = types.SimpleNamespace(axis_names=("a", "b", "s"), devices=array)
    line = "ROOT %r = f32[16,8] all-reduce(%x), channel_id=1, use_global_device_ids=true, "
    row = only_row(program(line + "replica_groups={{0,1},{2,3}}", devices=4), mesh=mesh)
    assert row.axis == ("b",)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (MEGASCALE % '_xla_megascale_transfer_type="SHUFFLE"', "unknown type 'SHUFFLE'"),
        (MEGASCALE % '_xla_megascale_transfer_type="ALL_REDUCE"', "targets of send not understood"),
        (MEGASCALE % "a=1", "unknown type None"),
    ],
)
def test_an_unknown_transfer_across_slices_is_an_error(attributes, message):
    lines = ["%t = token[] after-all()", f"ROOT %send = (f32[16,8]{{1,0}}, u32[], token[]) send(%x, %t), {attributes}"]
    with pytest.raises(ValueError, match=message):
        wire_bytes(program(*lines))


def _send_and_recv(attributes):
    return program(
        "%t = token[] after-all()",
        f"%s = (f32[16,8]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=2{attributes}",
        "%sd = token[] send-done(%s), channel_id=2",
        f"%r = (bf16[4]{{0}}, u32[], token[]) recv(%t), channel_id=3{attributes}",
        "ROOT %rd = (bf16[4]{0}, token[]) recv-done(%r), channel_id=3",
    )


@pytest.mark.parametrize(("attributes", "prefix"), [("", ""), (", is_host_transfer=true", "host-")])
def test_send_and_recv_count_their_data(attributes, prefix):
    report = wire_bytes(_send_and_recv(attributes))
    sent, received = report.rows
    assert (sent.kind, sent.sent_bytes, sent.received_bytes) == (prefix + "send", M, 0)
    assert (received.kind, received.sent_bytes, received.received_bytes) == (prefix + "recv", 0, 8)
    assert (report.sent, report.received, report.operand) == (M, 8, M)


def test_a_recv_of_several_arrays_counts_them_all():
    lines = ["%t = token[] after-all()", "ROOT %r = ((s8[3], s8[4]), u32[], token[]) recv(%t)"]
    assert wire_bytes(program(*lines)).received == 7


def test_the_pairs_of_a_send_give_its_group():
    pairs = ', frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
    assert wire_bytes(_send_and_recv(pairs)).rows[0].groups == ((0, 1, 2),)


# One all-gather that TPU spreads over three fusions; only the first starts it.
CONTINUED = (
    "%start (p: f32[16,8]) -> (f32[16,8], f32[64,8]) {\n"
    "  %p = f32[16,8]{1,0} parameter(0)\n"
    f"  %ag.1 = f32[64,8]{{1,0}} all-gather(%p), {GROUPS}, dimensions={{0}}, "
    'backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}\n'
    "  ROOT %c = (f32[16,8], f32[64,8]) custom-call(%ag.1), "
    'custom_call_target="AsyncCollectiveStart"\n}\n\n'
    "%async_collective_fusion (p.1: f32[16,8]) -> f32[64,8] {\n"
    "  %p.1 = f32[16,8]{1,0} parameter(0)\n"
    f"  ROOT %ag.2 = f32[64,8]{{1,0}} all-gather(%p.1), {GROUPS}, dimensions={{0}}, "
    'backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}\n}\n\n'
    "%done (p.2: f32[16,8]) -> f32[64,8] {\n"
    "  %p.2 = f32[16,8]{1,0} parameter(0)\n"
    f"  %ag.3 = f32[64,8]{{1,0}} all-gather(%p.2), {GROUPS}, dimensions={{0}}, "
    'backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}\n'
    "  ROOT %c.1 = f32[64,8] custom-call(%p.2, %ag.3), "
    'custom_call_target="AsyncCollectiveDone"\n}\n'
)
CONTINUED_CALLS = [
    "%f = (f32[16,8], f32[64,8]) fusion(%x), kind=kCustom, calls=%start",
    "%g = f32[64,8] fusion(%x), kind=kOutput, calls=%async_collective_fusion",
    "ROOT %h = f32[64,8] fusion(%x), kind=kCustom, calls=%done",
]


def test_a_collective_spread_over_fusions_counts_once():
    row = only_row(program(*CONTINUED_CALLS, before=CONTINUED))
    assert (row.name, row.count, row.sent_bytes) == ("ag.1", 1, 3 * M)


def test_a_fused_collective_without_a_start_is_an_error():
    before = CONTINUED.replace("AsyncCollectiveStart", "Sharding")
    with pytest.raises(ValueError, match="start was not found"):
        wire_bytes(program(*CONTINUED_CALLS, before=before))


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter():
    before = (
        "%all-reduce-scatter.3 (p: f32[16,8]) -> f32[4,8] {\n"
        "  %p = f32[16,8]{1,0} parameter(0)\n  %i = u32[] partition-id()\n"
        f"  %ar = f32[16,8]{{1,0}} all-reduce(%p), {GROUPS}, to_apply=%add\n"
        "  ROOT %ds = f32[4,8]{1,0} dynamic-slice(%ar, %i, %i), dynamic_slice_sizes={4,8}\n}\n"
    )
    fusion = "ROOT %f = f32[4,8] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3"
    row = only_row(program(fusion, before=before))
    assert (row.kind, row.sent_bytes) == ("reduce-scatter", 3 * M // 4)


def test_a_computation_called_twice_counts_twice_in_one_row():
    before = (
        "%f (p: f32[16,8]) -> f32[16,8] {\n  %p = f32[16,8] parameter(0)\n"
        f"  ROOT %ar = f32[16,8] all-reduce(%p), {GROUPS}, to_apply=%add\n}}\n"
    )
    calls = ["%a = f32[16,8] call(%x), to_apply=%f", "ROOT %b = f32[16,8] call(%a), to_apply=%f"]
    row = only_row(program(*calls, before=before))
    assert (row.count, row.operand_bytes, row.sent_bytes) == (2, 2 * M, 2 * 2 * 3 * M // 4)


def _loop(limit="constant(6)", init="constant(0)", step="constant(1)", direction="LT"):
    """A loop as TPU writes it: no trip count, a counter that the body increases."""
    state = "(s32[]{:T(128)}, f32[16,8]{1,0:T(8,128)}, s32[])"
    before = (
        f"%cond (p: {state}) -> pred[] {{\n  %p = {state} parameter(0)\n"
        "  %i = s32[]{:T(128)} get-tuple-element(%p), index=0\n"
        f"  %limit = s32[]{{:T(128)}} {limit}\n"
        f"  ROOT %lt = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}\n}}\n\n"
        f"%body (q: {state}) -> {state} {{\n  %q = {state} parameter(0)\n"
        "  %j = s32[]{:T(128)} get-tuple-element(%q), index=0\n"
        "  %copy.1 = s32[]{:T(128)S(6)} copy(%j)\n"
        "  %y = f32[16,8]{1,0} get-tuple-element(%q), index=1\n"
        "  %end = s32[] get-tuple-element(%q), index=2\n"
        f"  %step = s32[]{{:T(128)}} {step}\n  %next = s32[] add(%copy.1, %step)\n"
        f"  %ar = f32[16,8]{{1,0}} all-reduce(%y), {GROUPS}, to_apply=%add\n"
        f"  ROOT %t = {state} tuple(%next, %ar, %end)\n}}\n"
    )
    return program(
        f"%zero = s32[] {init}",
        "%copy.2 = s32[] copy(%zero)",
        "%end.1 = s32[] constant(11)",
        f"%init = {state} tuple(%copy.2, %x, %end.1)",
        f"ROOT %w = {state} while(%init), condition=%cond, body=%body",
        before=before,
    )


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({}, 6),
        ({"direction": "LE"}, 7),
        ({"init": "constant(2)"}, 4),
        ({"step": "constant(4)"}, 2),
        ({"init": "constant(-3)"}, 9),
        ({"limit": "get-tuple-element(%p), index=2"}, 11),
        ({"init": "constant(9)"}, 0),
    ],
)
def test_a_counting_loop_tells_its_trips(changes, trips):
    report = wire_bytes(_loop(**changes), trip_count=1000)
    assert report.operand == trips * M


@pytest.mark.parametrize(
    "changes",
    [
        {"direction": "NE"},
        {"init": "parameter(1)"},
        {"step": "constant(0)"},
        {"step": "get-tuple-element(%q), index=2"},
        {"limit": "get-tuple-element(%p), index=0"},
    ],
)
def test_any_other_loop_does_not(changes):
    with pytest.raises(ValueError, match=r"loop w .* pass trip_count="):
        wire_bytes(_loop(**changes))
    assert wire_bytes(_loop(**changes), trip_count=1000).operand == 1000 * M


@pytest.mark.parametrize("written", ['{"n":"12"}', '{"n":12}', '{ "n" : "12" }'])
def test_a_known_trip_count_comes_first(written):
    config = f'body=%body, backend_config={{"a":["x}}"],"known_trip_count":{written}}}'
    text = _loop(init="parameter(1)").replace("body=%body", config)
    assert wire_bytes(text, trip_count=1000).operand == 12 * M


def test_a_conditional_on_a_truth_value_numbers_its_branches_as_lax_cond():
    before = (
        "%yes (p: f32[16,8]) -> f32[16,8] {\n  %p = f32[16,8] parameter(0)\n"
        f"  ROOT %ar = f32[16,8] all-reduce(%p), {GROUPS}, to_apply=%add\n}}\n\n"
        "%no (q: f32[16,8]) -> f32[16,8] {\n  ROOT %q = f32[16,8] parameter(0)\n}\n"
    )
    text = program(
        "%b = pred[] constant(true)",
        "ROOT %c = f32[16,8] conditional(%b, %x, %x), true_computation=%yes, false_computation=%no",
        before=before,
    )
    assert wire_bytes(text, branch=1).operand == wire_bytes(text).operand == M
    assert wire_bytes(text, branch=0).rows == ()
    assert wire_bytes(text, branch=0).conditionals[0].sent == (0, 2 * 3 * M // 4)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("all-shuffle(%x), replica_groups={}", "opcode 'all-shuffle'"),
        ("reduce-scatter-v2(%x)", "opcode 'reduce-scatter-v2'"),
        ("collective-fold(%x)", "looks like communication"),
        ("sendrecv(%x)", "looks like communication"),
        ("ragged-all-to-all(%x, %x)", "use an all_to_all of padded rows"),
        ('custom-call(%x), custom_call_target="xla.gpu.nccl_sum"', "'xla.gpu.nccl_sum'"),
        ('custom-call(%x), custom_call_target="mpi_allreduce"', "collective of jax.lax"),
        ('custom-call(%x), custom_call_target="__AllReduceInPlace"', "collective of jax.lax"),
        (
            'custom-call(%x), custom_call_target="tpu_custom_call", '
            'backend_config={"custom_call_config":{"body":"A", "has_communication": true}}',
            "out of the compiler's sight",
        ),
        (
            "collective-permute(%x, %x), source_target_pairs={{0,1}}, slice_sizes={{1,8}}",
            "in place, which is not counted",
        ),
        (f"all-gather(%x), {GROUPS}, dimensions={{0}}", "replica_groups were not understood"),
        ("call(%x), to_apply=%missing", "does not define it"),
        (f"all-reduce(%gone), {GROUPS}", "'%gone' of odd is not defined"),
    ],
)
def test_what_is_not_understood_is_an_error(instruction, message):
    with pytest.raises(ValueError, match=message) as error:
        wire_bytes(program(f"ROOT %odd = f32[16,8]{{1,0}} {instruction}"))
    assert "odd" in str(error.value) or "missing" in str(error.value)


@pytest.mark.parametrize(
    "instruction",
    [
        "after-all()",
        "call-start(%x), to_apply=%id",
        "ragged-dot(%x, %x)",
        "copy-start(%x), cross_program_prefetch_index=0",
        "dynamic-update-slice(%x, %x)",
        'custom-call(%x), custom_call_target="AllocateBuffer", backend_config={"a":"all-to-all"}',
        'add(%x, %x), metadata={op_name="jit(f)/all-reduce(psum)" source_file="a,{.py"}',
        "broadcast(%x), dimensions={0,1}",
    ],
)
def test_what_does_not_communicate_is_not_mistaken_for_it(instruction):
    before = "%id (p: f32[16,8]) -> f32[16,8] {\n  ROOT %p = f32[16,8] parameter(0)\n}\n"
    assert wire_bytes(program(f"ROOT %y = f32[16,8] {instruction}", before=before)).rows == ()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("pred[3]", 3),
        ("s4[5]{0:T(8,128)(8,1)E(4)}", 3),
        ("u2[5]{0}", 2),
        ("f8e4m3fn[6,2]{1,0}", 12),
        ("f8e8m0fnu[4]", 4),
        ("f4e2m1fn[4]", 2),
        ("bf16[16,8]{1,0:T(8,128)(2,1)S(1)}", 256),
        ("f64[2]", 16),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("u64[]", 8),
        ("f32[<=10,2]", 80),
        ("f32[0,3]", 0),
        ("token[]", 0),
        ("(f32[2]{0}, (u8[3], s16[1]{0:T(128)}), token[])", 13),
    ],
)
def test_bytes_of_a_shape(text, size):
    assert sum(array.bytes for array in parse_shape(text)) == size


def test_a_shape_that_cannot_be_measured_is_an_error():
    with pytest.raises(ValueError, match="without a bound"):
        parse_shape("f32[?,2]")
    with pytest.raises(ValueError, match="unknown HLO element type 'q7'"):
        _ = ArrayShape("q7", (2,)).bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @jit_f {\n  func.func @main() {\n  }\n}", "no ENTRY computation"),
        ("", "no ENTRY computation"),
        (program("ROOT %y = f32[] negate(%x)") * 2, "2 HLO modules"),
        (program("ROOT %y = f32[16,8] negate(%x"), "no closing bracket"),
        (program("ROOT %y = strange"), "cannot read the HLO instruction"),
    ],
)
def test_text_that_is_not_one_module_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        wire_bytes(text)


FRAMES = """
FileNames
1 "/home/me/train.py"
2 "/lib/site-packages/optax/_src/base.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=2 end_column=2}
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=2 end_column=2}
3 {file_name_id=2 function_name_id=1 line=300 end_line=300 column=2 end_column=2}

StackFrames
"""


def callers(root: int | None) -> str:
    """Each frame but the first was called by the one before; what the first says of its caller is ``root``."""
    first = "" if root is None else f" parent_frame_id={root}"
    rest = (f"{i} {{file_location_id={i} parent_frame_id={i - 1 + (root or 0)}}}\n" for i in (2, 3))
    return f"1 {{file_location_id=1{first}}}\n" + "".join(rest)


LINES = ("/lib/site-packages/optax/_src/base.py:300", "/home/me/train.py:7", "/home/me/train.py:20")
REDUCED = f"f32[16,8] all-reduce(%x), {GROUPS}, to_apply=%add"


def with_frames(*lines, root=1):
    before, _, rest = program(*lines).partition("\nFileNames")
    return before + FRAMES + callers(root) + "\n\n" + rest[rest.index("ENTRY") :]


@pytest.mark.parametrize("root", [1, 0, None])
def test_a_collective_has_the_lines_that_led_to_it(root):
    """JAX 0.10 and 0.12 count callers from 2, so that 1 is none."""
    text = with_frames(f'ROOT %r = {REDUCED}, metadata={{op_name="jit(f)/psum" stack_frame_id=3}}', root=root)
    assert only_row(text).source == LINES
    assert own_line(LINES) == "/home/me/train.py:7"
    assert own_line((wire_bytes.__code__.co_filename + ":1", *LINES)) == "/home/me/train.py:7"
    assert own_line(LINES[:1]) == LINES[0] and own_line(()) == ""


def test_older_text_has_the_line_in_the_instruction():
    where = 'op_name="jit(f)/psum" source_file="/home/me/my, {train}.py" source_line=12'
    assert only_row(program(f"ROOT %r = {REDUCED}, metadata={{{where}}}")).source == ("/home/me/my, {train}.py:12",)


def test_a_collective_of_the_compilers_own_has_the_lines_of_what_reads_it_or_else_of_what_it_reads():
    named = 'metadata={op_name="jit(f)/reshape" stack_frame_id=2}'
    read = [f"%r = {REDUCED}", "%b = f32[128] bitcast(%r)", f"ROOT %d = f32[128] reshape(%b), {named}"]
    assert only_row(with_frames(*read)).source == LINES[1:]
    reads = [f"%y = f32[16,8] negate(%x), {named}", f"ROOT %r = {REDUCED.replace('%x', '%y')}"]
    assert only_row(with_frames(*reads)).source == LINES[1:]
    assert only_row(with_frames(f"ROOT %r = {REDUCED}")).source == ()
