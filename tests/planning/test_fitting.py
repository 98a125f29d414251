"""Lines through measured times."""

import numpy as np
import pytest

from gradcomp_jax.planning import fit
from gradcomp_jax.planning.fitting import Point

SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)


def points(times) -> list[Point]:
    return [Point(size, t, t, t) for size, t in zip(SIZES, times, strict=True)]


def test_a_line_is_found_again() -> None:
    found = fit(points([0.002 + 3e-8 * size for size in SIZES]))
    assert found.alpha == pytest.approx(0.002) and found.beta == pytest.approx(3e-8)
    assert max(found.errors) < 1e-9
    assert found.seconds(1e8) == pytest.approx(0.002 + 3.0)
    assert found.line(2e5) == pytest.approx(found.seconds(2e5))


def test_an_outlier_does_not_bend_it() -> None:
    """One size that took five times as long; least squares would be off by tens of percent."""
    times = np.array([0.002 + 3e-8 * size for size in SIZES])
    times[2] *= 5
    found = fit(points(times))
    assert found.alpha == pytest.approx(0.002, rel=0.1) and found.beta == pytest.approx(3e-8, rel=0.1)
    assert found.errors[1] > 0.5 > found.errors[0]


def test_no_term_is_negative() -> None:
    """Times that fall with the size, and times that are all bytes, are at the edge and not beyond it."""
    flat = fit(points([0.01, 0.0099, 0.0098, 0.0097, 0.0096]))
    assert flat.beta == 0 and flat.alpha == pytest.approx(0.0098, rel=0.02)
    steep = fit(points([1e-8 * size**1.02 for size in SIZES]))
    assert steep.alpha >= 0 and steep.beta > 0


def test_between_points_what_was_measured_counts() -> None:
    """A window that opens: the second half of the bytes costs less."""
    found = fit(points([0.01, 0.01, 0.02, 0.1, 0.2]))
    assert found.seconds(1e6) == pytest.approx(0.1)
    assert found.seconds(5.5e6) == pytest.approx(0.15)
    assert found.seconds(10) == pytest.approx(0.01)
    # Beyond the largest size by the last two: 0.1 s for 9e6 bytes.
    assert found.seconds(1.9e7) == pytest.approx(0.3)


def test_what_is_no_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        fit([Point(1e3, 1.0, 1.0, 1.0)] * 3)
    with pytest.raises(ValueError, match="finite and above 0"):
        fit(points([1.0, 0.0, 1.0, 1.0, 1.0]))


def test_a_message_that_took_next_to_nothing_does_not_bend_it() -> None:
    # Seen on a link whose shaper lets the first bytes through at once.
    found = fit([Point(s, t, t, t) for s, t in ((1024, 3e-5), (8192, 3.6e-3), (65536, 0.042), (524288, 0.427))])
    # Bytes a second of the three others: 2.3, 1.6 and 1.2 million.
    assert 1.2e6 <= 1 / found.beta <= 2.3e6
    assert found.errors[0] < 0.3 < found.errors[1] <= 1


def test_a_protocol_that_changes_at_the_last_size_is_not_taken_for_a_rate() -> None:
    """From some size on an exchange no longer sends and receives at once; more bytes still take no more than their share."""
    found = fit([Point(s, t, t, t) for s, t in ((1e3, 1e-3), (1e6, 1.0), (2e6, 2.0), (4e6, 8.0))])
    assert found.seconds(8e6) == pytest.approx(16.0, rel=1e-2)
