"""What a compiled program moves over main memory, in texts whose traffic is known by hand."""

import pytest

from benchmarks.compiled.traffic import placed, traffic

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

LOOP = """
HloModule m
body (p: (s32[], f32[7,8,128], f32[8,128])) -> (s32[], f32[7,8,128], f32[8,128]) {
  p = (s32[], f32[7,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[7,8,128]{2,1,0:T(8,128)} get-tuple-element(p), index=1
  sum = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(p), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  more = f32[8,128]{1,0:T(8,128)S(1)} fusion(x, i, sum), kind=kLoop, calls=cut, backend_config={"estimated_cycles":"50"}
  ROOT out = (s32[], f32[7,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(next, x, more)
}
cut (a: f32[7,8,128], b: s32[], c: f32[8,128]) -> f32[8,128] {
  a = f32[7,8,128]{2,1,0:T(8,128)} parameter(0)
  b = s32[] parameter(1)
  c = f32[8,128]{1,0:T(8,128)S(1)} parameter(2)
  zero = s32[] constant(0)
  row = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(a, b, zero, zero), dynamic_slice_sizes={1,8,128}
  flat = f32[8,128]{1,0:T(8,128)} bitcast(row)
  ROOT added = f32[8,128]{1,0:T(8,128)S(1)} add(c, flat)
}
condition (p: (s32[], f32[7,8,128], f32[8,128])) -> pred[] {
  p = (s32[], f32[7,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  limit = s32[] constant(7)
  ROOT less = pred[] compare(i, limit), direction=LT
}
ENTRY main (x: f32[7,8,128]) -> f32[8,128] {
  x = f32[7,8,128]{2,1,0:T(8,128)} parameter(0)
  zero = s32[] constant(0)
  start = f32[8,128]{1,0:T(8,128)S(1)} fusion(zero), kind=kLoop, calls=zeros
  all = (s32[], f32[7,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(zero, x, start)
  loop = (s32[], f32[7,8,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) while(all), condition=condition, body=body
  sum = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(loop), index=2
  copying = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]) copy-start(sum)
  ROOT out = f32[8,128]{1,0:T(8,128)} copy-done(copying)
}
zeros (z: s32[]) -> f32[8,128] {
  z = s32[] parameter(0)
  o = f32[] constant(0)
  ROOT b = f32[8,128]{1,0:T(8,128)S(1)} broadcast(o), dimensions={}
}
"""


def test_a_loop_counts_with_its_trips_and_what_stays_in_the_core_not_at_all() -> None:
    found = traffic(LOOP)
    by_name = {cost.name: cost for cost in found.costs}
    # A row in each of seven trips; the sum stays in the core until its copy.
    scalars = sum(cost.read + cost.written for cost in found.costs if cost.scalar and cost.kind == "kernel")
    assert by_name["more"].times == 7 and by_name["more"].read == 7 * 4096 + 7 * 4 and by_name["more"].written == 0
    assert (by_name["copying"].kind, by_name["copying"].read, by_name["copying"].written) == ("copy", 0, 4096)
    assert found.bytes == 7 * 4096 + 7 * 4 + 4096 + scalars
    assert found.launches == 8
    # The compiler expects 50 cycles of each trip; the start has no estimate, and touches 4,096 bytes.
    assert found.seconds(clock=1e9, bandwidth=1e9) == pytest.approx(350e-9 + 4096e-9)


def test_tiles_are_filled_and_other_spaces_are_not_main_memory() -> None:
    (whole,) = placed("f32[16,256]{1,0:T(8,128)}")
    (filled,) = placed("bf16[9,100]{1,0:T(8,128)(2,1)}")
    turned, core = placed("(f32[100,9]{0,1:T(8,128)}, u8[5]{0:T(1024)S(1)})")
    (plain,) = placed("s4[7]{0}")
    assert (whole.entries, whole.bytes, whole.main) == (16384, 16384, True)
    assert (filled.entries, filled.bytes) == (2 * 900, 2 * 16 * 128)
    assert (turned.bytes, core.bytes, core.main) == (4 * 16 * 128, 1024, False)
    assert (plain.entries, plain.bytes) == (4, 4)


UPDATE = """
HloModule m
update (a: f32[64,1024], b: f32[1,1024], i: s32[]) -> f32[64,1024] {
  a = f32[64,1024]{1,0} parameter(0)
  b = f32[1,1024]{1,0} parameter(1)
  i = s32[] parameter(2)
  zero = s32[] constant(0)
  twice = f32[1,1024]{1,0} add(b, b)
  ROOT out = f32[64,1024]{1,0} dynamic-update-slice(a, twice, i, zero)
}
first (a: f32[64,1024], b: f32[1,1024]) -> f32[64,1024] {
  a = f32[64,1024]{1,0} parameter(0)
  b = f32[1,1024]{1,0} parameter(1)
  ROOT n = f32[64,1024]{1,0} negate(a)
}
ENTRY main (a: f32[64,1024], b: f32[1,1024], i: s32[], p: pred[]) -> f32[64,1024] {
  a = f32[64,1024]{1,0} parameter(0)
  b = f32[1,1024]{1,0} parameter(1)
  i = s32[] parameter(2)
  p = pred[] parameter(3)
  new = f32[64,1024]{1,0} fusion(a, b, i), kind=kLoop, calls=update
  both = (f32[64,1024]{1,0}, f32[1,1024]{1,0}) tuple(new, b)
  sum = f32[64,1024]{1,0} all-reduce(new), replica_groups={}, to_apply=add
  ROOT out = f32[64,1024]{1,0} conditional(p, sum, both), true_computation=no, false_computation=yes
}
no (a: f32[64,1024]) -> f32[64,1024] {
  ROOT a = f32[64,1024]{1,0} parameter(0)
}
yes (t: (f32[64,1024], f32[1,1024])) -> f32[64,1024] {
  t = (f32[64,1024]{1,0}, f32[1,1024]{1,0}) parameter(0)
  x = f32[64,1024]{1,0} get-tuple-element(t), index=0
  ROOT n = f32[64,1024]{1,0} negate(x)
}
add (x: f32[], y: f32[]) -> f32[] {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}
"""


def test_an_update_in_place_a_conditional_and_a_collective() -> None:
    by_name = {cost.name: cost for cost in traffic(UPDATE).costs}
    assert (by_name["new"].read, by_name["new"].written) == (4096 + 4, 4096)
    # The branch that moves most counts; collectives are told apart, and not counted.
    assert by_name["n"].read == by_name["n"].written == 64 * 4096
    assert by_name["sum"].kind == "collective"
    assert traffic(UPDATE).bytes == 2 * 4096 + 4 + 2 * 64 * 4096 and traffic(UPDATE).launches == 2


PADDED = """
HloModule m
cut (a: f32[16,1024], i: s32[]) -> f32[4,1024] {
  a = f32[16,1024]{1,0} parameter(0)
  i = s32[] parameter(1)
  zero = s32[] constant(0)
  none = f32[] constant(0)
  padded = f32[64,1024]{1,0} pad(a, none), padding=24_24x0_0
  ROOT out = f32[4,1024]{1,0} dynamic-slice(padded, i, zero), dynamic_slice_sizes={4,1024}
}
ENTRY main (a: f32[16,1024], i: s32[]) -> f32[4,1024] {
  a = f32[16,1024]{1,0} parameter(0)
  i = s32[] parameter(1)
  ROOT out = f32[4,1024]{1,0} fusion(a, i), kind=kLoop, calls=cut
}
"""


def test_a_cut_of_what_zeros_fill_up_reads_no_more_than_the_cut() -> None:
    (cost,) = traffic(PADDED).costs
    assert (cost.read, cost.written) == (4 * 4096 + 4, 4 * 4096)


def test_a_loop_without_a_number_of_trips_is_refused() -> None:
    text = LOOP.replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="does not say how often loop runs"):
        traffic(text)
