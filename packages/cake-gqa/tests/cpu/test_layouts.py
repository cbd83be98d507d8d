"""Segments of context-parallel ranks: known layouts, and properties of all. Torch-free but for the last test."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from cake_gqa.layouts import BENCHMARKS, PACKS, RULES, benchmark_layout, packed_layout, zigzag_layout

# T_q, T_k, segments, longest window, pairs.
KNOWN = {
    "zz_cp8_r0_241817": (30_193, 256_933, 12, 50_709, 629_711_775),
    "zz_cp8_r0_261987": (32_737, 278_362, 6, 92_844, 1_431_827_715),
    "zz_cp8_r0_259174": (32_388, 275_373, 4, 133_686, 2_100_045_444),
    "zz_cp8_r3_120000": (15_000, 127_512, 10, 42_805, 246_604_654),
    "zz_cp4_r1_96000": (24_000, 108_003, 6, 30_239, 387_843_238),
    "zz_cp2_r0_40000": (20_000, 50_001, 4, 37_765, 357_806_495),
    "zz_cp8_r7_300000": (37_499, 318_788, 16, 78_878, 1_619_846_360),
    "zz_cp16_r0_420000": (26_249, 433_126, 6, 256_340, 2_530_001_572),
    "zz_cp1_r0_16461": (16_461, 24_693, 8, 6_105, 40_652_896),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmarks_are_the_known_ones(name: str) -> None:
    layout = benchmark_layout(name)
    found = layout.cu_q[-1], layout.cu_k[-1], len(layout.cu_q) - 1, layout.max_seqlen_k, layout.pairs
    assert found == KNOWN[name]
    assert layout.kv_total == int(name.rsplit("_", 1)[1])
    hits = Counter(layout.kv_rows)
    assert len(layout.kv_rows) == layout.cu_k[-1]
    assert max(hits.values()) <= 2
    assert min(hits) == 0
    assert max(hits) < layout.kv_total
    assert (max(hits) == layout.kv_total - 1) == ("_r0_" in name), "rank 0 has the last chunk, which sees everything"


def test_offsets_of_two_benchmarks() -> None:
    layout = benchmark_layout("zz_cp8_r0_259174")
    assert layout.cu_q == (0, 7843, 15686, 24042, 32388)
    assert layout.cu_k == (0, 7843, 133331, 141687, 275373)
    layout = benchmark_layout("zz_cp2_r0_40000")
    assert layout.cu_q == (0, 559, 1117, 10559, 20000)
    assert layout.cu_k == (0, 559, 2794, 12236, 50001)


@pytest.mark.parametrize("rule", RULES)
def test_the_ranks_share_the_queries_of_every_document(rule: str) -> None:
    """Each token is a query once, on one rank, and sees exactly the keys of its document up to itself."""
    draw = random.Random(3)
    for size in (1, 2, 3, 8):
        lengths = [draw.choice((0, 1, 2, 15, 16, 17, 300)) for _ in range(5)]
        starts = [0, *itertools.accumulate(lengths)]
        queries: list[int] = []
        pairs = 0
        for rank in range(size):
            layout = zigzag_layout(lengths, size, rank, rule)
            assert layout.kv_total == sum(lengths)
            assert len(layout.cu_q) == len(layout.cu_k) == 2 * len(lengths) + 1
            pairs += layout.pairs
            before = len(queries)
            for segment, (low, high) in enumerate(pairwise(layout.cu_k)):
                rows = layout.kv_rows[low:high]
                base = starts[segment // 2]
                assert rows == tuple(range(base, base + high - low)), "a window is the beginning of its document"
                count = layout.cu_q[segment + 1] - layout.cu_q[segment]
                assert count <= high - low
                queries += rows[len(rows) - count :]
            assert layout.q_rows == tuple(queries[before:])
        assert sorted(queries) == list(range(sum(lengths)))
        assert pairs == sum(length * (length + 1) // 2 for length in lengths)


def test_pairs_are_counted() -> None:
    """Against the definition, with more queries than keys too."""
    from cake_gqa.layouts import ZigzagLayout

    for rows, keys in itertools.product(range(6), repeat=2):
        want = sum(j <= i + keys - rows for i in range(rows) for j in range(keys))
        assert ZigzagLayout((0, rows), (0, keys), keys, (), 0).pairs == want


def test_chunks_by_rule() -> None:
    assert zigzag_layout([10], 2, 0, "split").cu_q == (0, 3, 5)
    assert zigzag_layout([10], 2, 1, "split").cu_q == (0, 3, 5)
    assert zigzag_layout([10], 2, 0, "ceil").cu_q == (0, 3, 4)
    assert zigzag_layout([10], 2, 1, "ceil").cu_q == (0, 3, 6)
    assert zigzag_layout([3], 4, 3, "ceil").cu_q == (0, 0, 0), "no token is left for the middle chunks"


def test_packs() -> None:
    for heads, key_heads, lengths in PACKS.values():
        assert heads % key_heads == 0
        layout = packed_layout(lengths)
        assert layout.cu_q == layout.cu_k
        assert layout.kv_rows == tuple(range(sum(lengths)))
        assert (layout.max_seqlen_k, layout.kv_total) == (max(lengths), sum(lengths))
    many = PACKS["qwen35-27b-tp2-64docs"][2]
    assert (len(many), sum(many)) == (64, 65_536)
    assert 256 <= min(many) < max(many) <= 8192


REFUSED: dict[str, tuple[type[Exception], str, tuple[Any, ...]]] = {
    "no-sequence": (TypeError, "doc_lens is of type int", (7, 2, 0)),
    "string": (TypeError, "doc_lens", ("12", 2, 0)),
    "float-length": (TypeError, r"doc_lens\[1\]", ([3, 4.0], 2, 0)),
    "bool-length": (TypeError, r"doc_lens\[0\]", ([True], 2, 0)),
    "no-document": (ValueError, "doc_lens is empty", ([], 2, 0)),
    "negative-length": (ValueError, r"doc_lens\[1\] is -1", ([3, -1], 2, 0)),
    "float-size": (TypeError, "cp_size", ([3], 2.0, 0)),
    "no-ranks": (ValueError, "cp_size is 0", ([3], 0, 0)),
    "rank-below": (ValueError, "cp_rank is -1", ([3], 2, -1)),
    "rank-above": (ValueError, "cp_rank is 2", ([3], 2, 2)),
    "rule-type": (TypeError, "rule", ([3], 2, 0, None)),
    "rule": (ValueError, "rule is 'floor'", ([3], 2, 0, "floor")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(name: str) -> None:
    kind, text, args = REFUSED[name]
    with pytest.raises(kind, match=f"^zigzag_layout: {text}"):
        zigzag_layout(*args)


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^benchmark_layout: name is 'zz'; needs one of 'zz_cp8_r0_241817'"):
        benchmark_layout("zz")
    with pytest.raises(ValueError, match="packed_layout: doc_lens is empty"):
        packed_layout(())


def test_layouts_load_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from cake_gqa.layouts import *; "
        "print(benchmark_layout('zz_cp2_r0_40000').cu_q[-1])"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "20000", done.stderr[-2000:]


def test_tensors_are_int32() -> None:
    import torch

    layout = zigzag_layout([5, 3], 1, 0)
    tensors = layout.tensors("cpu")
    assert [t.dtype for t in tensors] == [torch.int32] * 3
    assert tuple(tuple(t.tolist()) for t in tensors) == (layout.cu_q, layout.cu_k, layout.kv_rows)


@pytest.mark.parametrize("rule", RULES)
def test_the_ranks_together_are_the_whole_batch(rule: str) -> None:
    """Outputs of the chunks are rows of the whole output, gradients of the windows add up to those of the keys."""
    import torch
    from cake_core.testing.operands import normal
    from cake_gqa import varlen_gqa_attention_bwd, varlen_gqa_attention_fwd

    lengths, ranks = (37, 0, 150), 3
    q, k, v, dout = (normal(seed, 187, heads, 256, dtype=torch.float64) for seed, heads in enumerate((2, 1, 1, 2)))
    cu, _, _ = packed_layout(lengths).tensors("cpu")
    out, lse = varlen_gqa_attention_fwd(q, k, v, cu, cu)
    want = varlen_gqa_attention_bwd(q, k, v, out, lse, dout, cu, cu, max_seqlen_k=150)
    found = torch.zeros_like(q), torch.zeros(187, 1, 256), torch.zeros(187, 1, 256)
    for rank in range(ranks):
        layout = zigzag_layout(lengths, ranks, rank, rule)
        cu_q, cu_k, rows = layout.tensors("cpu")
        ends = [layout.kv_rows[high - 1] + 1 if high > low else 0 for low, high in pairwise(layout.cu_k)]
        counts = [high - low for low, high in pairwise(layout.cu_q)]
        own = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        operands = q[own], k[rows.long()], v[rows.long()]
        mine, logs = varlen_gqa_attention_fwd(*operands, cu_q, cu_k)
        torch.testing.assert_close(mine, out[own], rtol=1e-12, atol=1e-12)
        dq, _, _ = varlen_gqa_attention_bwd(
            *operands, mine, logs, dout[own], cu_q, cu_k, max_seqlen_k=layout.max_seqlen_k,
            dk_acc=found[1], dv_acc=found[2], row_map=rows,
        )  # fmt: skip
        assert dq is not None
        found[0][own] += dq
    for got, expected in zip(found, want, strict=True):
        assert expected is not None
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
