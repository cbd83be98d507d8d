"""Integer helpers of the two plans."""

from __future__ import annotations

from cake_core.intmath import ceil_div

__all__ = ["cut_into_waves"]


def cut_into_waves(rows: int, step: int, wave: int, max_steps: int) -> tuple[int, int]:
    """(waves, CTAs of a wave) for ``rows`` >= 1, so that no CTA takes more than ``max_steps`` steps of ``step`` rows.

    One wave as long as that holds, of at most ``wave`` CTAs, each with at least two steps where there are enough rows.
    """
    waves = ceil_div(rows, wave * step * max_steps)
    return waves, wave if waves > 1 else min(wave, ceil_div(rows, 2 * step))
