"""What the byte queries say of a call under a context is what it keeps and what it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.kcp import LocalExchange, build_context_kcp, partition_kcp
from cake_gdn import (
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    gdn_kcp_comm_bytes,
    gdn_saved_bytes,
)

OFFSETS = (0, 37, 88, 128, 300)
KEY_HEADS, HEADS = 1, 3
STATE = 4 * 128 * 128


@pytest.mark.parametrize("exchange", ["a2a", "all_gather"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_queries_count_what_a_step_keeps_and_sends(ranks: int, layout: str, exchange: str) -> None:
    part, local = partition_kcp(OFFSETS, ranks, layout), LocalExchange(ranks)

    def step(rank: int) -> dict[str, int]:
        ctx = build_context_kcp(part, None if ranks == 1 else local.rank(rank), rank, "cpu", exchange=exchange)
        draw = torch.Generator().manual_seed(rank)
        q, k, v = (torch.randn(1, ctx.T_r, heads, 128, generator=draw) for heads in (KEY_HEADS, KEY_HEADS, HEADS))
        g, beta = (torch.rand(1, ctx.T_r, HEADS, generator=draw) for _ in range(2))
        given: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "cp_context": ctx}
        for save in ("light", "full"):
            o, _, saved = chunk_gated_delta_rule_fwd(q, k, v, -g, beta, save=save, **given)
            assert saved is not None
            sizes = (ctx.T_r, ctx.n_frag, KEY_HEADS, HEADS)
            told = gdn_saved_bytes(*sizes, save=save, tape_dtype="float32", **given)
            assert saved.nbytes == told, f"{save} on rank {rank}"
            if save == "full":
                chunk_gated_delta_rule_bwd(q, k, v, -g, beta, o, saved=saved, **given)
        return gdn_kcp_comm_bytes(ctx, HEADS)

    told = local.run(step)
    for rank in range(ranks):
        counts = [sent for r, _, sent in local.calls if r == rank]
        if exchange == "a2a":
            rows = [STATE * sum(sent) for sent in counts]
        else:  # [fragments, heads, 2, K, V] forward, [fragments, heads, K, V] backward, the same to everyone
            rows = [STATE * HEADS * sent[0] * (2 if call < 2 else 1) for call, sent in enumerate(counts)]
        c1, c2, b1, b2 = (told[rank][name] for name in ("c1", "c2", "b1", "b2"))
        if ranks == 1:
            assert (rows, c1, c2, b1, b2) == ([], 0, 0, 0, 0)
        else:
            assert rows == ([c1, c2] * 2 + [b1, b2] if exchange == "a2a" else [c1, c1, b1])
