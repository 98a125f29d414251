"""What a step cannot beat, what the interfaces must count, and what the benchmark has to show."""

from collections.abc import Mapping
from typing import Any

from gradcomp_jax.planning.predict import CLEAR

SEGMENT = 1448
"""Payload bytes of a full TCP segment: 1,500 less 20 of IPv4, 20 of TCP and 12 of its time stamps."""
HEADER = 14 + 52
"""Bytes around it, the Ethernet header included."""
BEAT = 2_000
"""Bytes a second for what is not the exchange: the coordination service's heartbeats and polls."""


def bound_s(computation_s: float, sent: int, rate: float | None) -> float:
    """max(computation + compression, bytes / rate): communication hidden behind computation, or the other way round."""
    return max(computation_s, 0.0 if rate is None else 8 * sent / rate)


def counted_range(sent: int, received: int, collectives: int, workers: int, seconds: float) -> tuple[float, float]:
    """Between what and what an interface's ``tx_bytes`` for one step must lie, by this model:

    at least 0.95 of the payload; at most 1.05 of it, with a header for each full segment, an acknowledgement for every other
    segment that comes in, gloo's handshakes (eight packets with each peer for each round of a collective), and the heartbeat.
    The kernel counts up to 64 KiB that it hands to an interface at once as one packet: then most headers are missing.
    """
    headers = HEADER * sent / SEGMENT
    acknowledgements = HEADER * received / (2 * SEGMENT)
    rounds = collectives * 2 * (workers - 1)
    handshakes = rounds * 8 * 2 * HEADER
    return 0.95 * sent, 1.05 * sent + headers + acknowledgements + handshakes + BEAT * seconds


def exchange_s(cell: Mapping[str, Any], method: str) -> float:
    """The part of a step that is not computation, seconds."""
    return cell["methods"][method]["step_s"] - cell["nothing_s"]


def steps_to(losses: list[float], target: float, window: int = 10) -> int | None:
    """Steps until the mean of the last ``window`` losses is at or below the target; ``None`` if it never is."""
    for end in range(window, len(losses) + 1):
        if sum(losses[end - window : end]) / window <= target:
            return end
    return None


def target_loss(losses: list[float], window: int = 10) -> float:
    """The loss that the dense run reaches after 70% of its steps."""
    end = max(window, round(0.7 * len(losses)))
    part = losses[max(0, end - window) : end]
    return sum(part) / len(part)


def choose(times: Mapping[str, float]) -> str:
    """The fastest method, or the better dense one where it is not clearly slower; the fastest where there is no dense one."""
    best = min(times, key=times.__getitem__)
    dense = min((name for name in times if name.startswith("dense")), key=times.__getitem__, default=best)
    return dense if times[dense] < CLEAR * times[best] else best


def verdict(cell: Mapping[str, Any]) -> str:
    """The fastest method, and by how much it beats the better of the dense baselines."""
    times = {name: m["step_s"] for name, m in cell["methods"].items()}
    best, chosen = min(times, key=times.__getitem__), choose(times)
    dense = min((name for name in times if name.startswith("dense")), key=times.__getitem__, default=None)
    if dense is None:
        return best
    gain = times[dense] / times[best]
    if chosen == dense:
        return f"{dense}: do not compress" + (f" ({best} {gain:.2f}x)" if best != dense else "")
    return f"{best}, {gain:.2f}x the better dense one"
