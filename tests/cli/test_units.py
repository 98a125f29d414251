"""Quantities as people write them."""

import pytest

pytest.importorskip("quantiphy")

from gradcomp_jax.cli import units
from gradcomp_jax.experiments import SettingError


@pytest.mark.parametrize(
    ("text", "want"),
    [
        *(("10Gbit", 1.25e9), ("10 Gbit/s", 1.25e9), ("25Gbps", 3.125e9), ("1.25GB/s", 1.25e9), ("100Mbit", 12.5e6)),
        *(
            ("10gbps", 1.25e9),
            ("10gbit", 1.25e9),
            ("10Gb/s", 1.25e9),
            ("20 mbps", 2.5e6),
            ("5kbit/s", 625),
            ("1gB/s", 1e9),
        ),
    ],
)
def test_rates_are_bytes_a_second(text, want) -> None:
    assert units.rate("--link", text) == pytest.approx(want)


@pytest.mark.parametrize(
    ("text", "want"), [("180ms", 0.18), ("50us", 50e-6), ("50 us", 50e-6), ("0", 0), ("1.5s", 1.5)]
)
def test_times_are_seconds(text, want) -> None:
    assert units.seconds("--latency", text) == pytest.approx(want)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("25.6M", 25_600_000),
        ("8B", 8 * 10**9),
        ("25557032", 25_557_032),
        ("25,557,032", 25_557_032),
        ("1e3", 1000),
        ("70b", 7e10),
    ],
)
def test_counts_are_whole(text, want) -> None:
    assert units.count("--params", text) == want


@pytest.mark.parametrize(
    "text",
    [
        *(
            "127.0.0.1:99999",
            "1e3:7",
            "10.0.0.1",
            "5M:3",
            "1.2.3",
            "1,5M",
            "1,23",
            "10..20",
            "1-5",
            "0x10",
            "10%",
            "$5",
        ),
        *("25.6m", "5mB", "0.5kB", "5Mb", "5u", "8Bn", "5MM", "", "M", "five"),
    ],
)
def test_what_is_no_count_is_one_sentence(text) -> None:
    """An address is not its port, a price is no number, and a millionth or a thousand of a billion is nobody's model."""
    with pytest.raises(SettingError, match=r"^--params must be a number, such as 25.6M, 8B or 25557032, got '"):
        units.count("--params", text)


@pytest.mark.parametrize(
    "text", ["10.0.0.1:8476bit", "1e3:7bit", "10Gbit:1", "10GiB/s", "10Gbit,25Gbit", "1,5Gbit", "10G bit"]
)
def test_what_only_ends_as_a_rate_is_none(text) -> None:
    with pytest.raises(SettingError, match=r"^--link must be a number with bit/s or B/s, such as 10Gbit"):
        units.rate("--link", text)


@pytest.mark.parametrize("text", ["1:30s", "50us:1", "10.0.0.1:5s", "1ks", "1,5s", "0x1s"])
def test_what_only_ends_as_a_time_is_none(text) -> None:
    with pytest.raises(SettingError, match=r"^--latency must be a number with s, ms, us or ns"):
        units.seconds("--latency", text)


@pytest.mark.parametrize("text", ["10", "ten", "10GHz", "-1Gbit", "0bit", "infbit", "", "10 Gbit of it"])
def test_what_is_no_rate_is_one_sentence(text) -> None:
    with pytest.raises(SettingError, match=r"^--link must be (a number with bit/s or B/s, such as 10Gbit|above 0)"):
        units.rate("--link", text)


@pytest.mark.parametrize("text", ["5", "-3ms", "5 parsecs", "1min", "soon"])
def test_what_is_no_time_is_one_sentence(text) -> None:
    with pytest.raises(SettingError, match=r"^--latency must be (a number with s, ms, us or ns|at least 0)"):
        units.seconds("--latency", text)


def test_they_are_shown_as_people_write_them() -> None:
    assert units.show_rate(3.9e8) == "3.12 Gbit/s"
    assert units.show_seconds(0.18) == "180 ms" and units.show_seconds(0) == "0"
    assert units.show_bytes(97.5e6) == "97.5 MB"
