"""Chunks, segments and bytes: functions of offsets and sizes alone. Torch-free."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise

import pytest
from cake_gdn import gdn_saved_bytes, gdn_workspace_bytes, plan

PACKS = ((0, 1), (0, 64), (0, 65), (0, 0, 63, 127, 127, 1000), (0, 0, 0), (0, 8192), (0, *range(1, 40)))


@pytest.mark.parametrize("how", ["auto", "serial", 2, 4, 128])
@pytest.mark.parametrize("offsets", PACKS)
def test_every_token_is_in_one_chunk_of_its_document(offsets: tuple[int, ...], how: str | int) -> None:
    """A document starts a new chunk; every chunk but its last has 64 tokens."""
    tables = plan.tables(offsets, how)
    want = [(first, min(64, end - first)) for start, end in pairwise(offsets) for first in range(start, end, 64)]
    assert list(tables.chunks) == want
    assert tables.end == offsets[-1]
    assert len(want) <= plan.max_chunks(offsets[-1], len(offsets) - 1)


@pytest.mark.parametrize("how", ["serial", 2, 4, 128])
@pytest.mark.parametrize("offsets", PACKS)
def test_segments_cut_documents_and_nothing_else(offsets: tuple[int, ...], how: str | int) -> None:
    """Every chunk once, in order, of one document; as long as asked for but the last; longest first in the order."""
    tables = plan.tables(offsets, how)
    lengths = [end - start for start, end in pairwise(offsets)]
    seen = 0
    for segment in tables.segments:
        assert segment.chunk == seen
        seen += segment.chunks
        before = sum(-(-length // 64) for length in lengths[: segment.document])
        count = -(-lengths[segment.document] // 64)
        assert before <= segment.chunk < seen <= before + count
        assert segment.is_first == (segment.chunk == before)
        assert segment.is_last == (seen == before + count)
        wanted = count if how == "serial" else how
        assert segment.chunks == wanted or (segment.is_last and segment.chunks < int(wanted))
    assert seen == len(tables.chunks)
    assert sorted(tables.order) == list(range(len(tables.segments)))
    ordered = [tables.segments[index].chunks for index in tables.order]
    assert ordered == sorted(ordered, reverse=True)
    equal = [index for index in tables.order if tables.segments[index].chunks == (ordered or [0])[0]]
    assert equal == sorted(equal), "equal ones stay in token order"


@pytest.mark.parametrize("how", ["serial", 2, 64])
def test_the_cut_of_a_document_does_not_depend_on_the_pack(how: str | int) -> None:
    """det: with a fixed plan a document's segments, counted from its own first chunk, are those of its own call."""
    draw = random.Random(0)
    lengths = [draw.choice((0, 1, 64, 65, 500, 9000)) for _ in range(30)]
    packed = plan.tables(tuple(sum(lengths[:n]) for n in range(31)), how)
    for document, length in enumerate(lengths):
        own = [segment for segment in packed.segments if segment.document == document]
        alone = plan.tables((0, length), how).segments
        assert [(s.chunk - own[0].chunk, s.chunks) for s in own] == [(s.chunk, s.chunks) for s in alone]


def test_documents_of_more_than_one_segment() -> None:
    tables = plan.tables((0, 1, 300, 364, 900), 2)
    assert [[s.document for s in cut] for cut in tables.cut()] == [[1, 1, 1], [3] * 5]
    assert not list(plan.tables((0, 1, 300, 364, 900), "serial").cut())


def test_tables_are_kept_by_value_and_bounded() -> None:
    plan.tables.cache_clear()
    offsets = (0, 5, 70)
    assert plan.tables(offsets, 2) is plan.tables((0, 5, 70), 2)
    assert plan.tables(offsets, 2) is not plan.tables(offsets, 4)
    for n in range(300):
        plan.tables((0, n), "serial")
    assert plan.tables.cache_info().maxsize == 256
    assert plan.tables.cache_info().currsize <= 256


def test_the_bound_on_chunks_is_reached_and_never_passed() -> None:
    draw = random.Random(1)
    for _ in range(300):
        lengths = [draw.choice((0, 1, 2, 63, 64, 65, 200)) for _ in range(draw.randrange(1, 9))]
        chunks = sum(-(-length // 64) for length in lengths)
        assert chunks <= plan.max_chunks(sum(lengths), len(lengths))
    assert plan.max_chunks(8192, 1) == 128
    assert plan.max_chunks(5, 5) == 5
    assert plan.max_chunks(66, 2) == 3, "of 65 and 1 tokens"
    assert plan.max_chunks(0, 3) == 0


# --- bytes ------------------------------------------------------------------------------------------------------


def test_saved_bytes_are_the_table_of_the_spec() -> None:
    """Spec 3.8 at stride 1, BF16: Z 128, e 256, S 512 a token and value head; r_q and r_k 8 / r."""
    T, heads, value_heads = 32768, 16, 64
    pairs = T * value_heads

    def saved(save: str, norm: bool) -> int:
        return gdn_saved_bytes(T, 1, heads, value_heads, save=save, use_qk_l2norm_in_kernel=norm)

    assert saved("full", False) == pairs * (128 + 256 + 512)
    assert saved("light", False) == pairs * 128
    assert saved("none", True) == 0
    assert saved("light", True) == pairs * 128 + T * heads * 8
    wide = gdn_saved_bytes(T, 1, heads, value_heads, save="light", use_qk_l2norm_in_kernel=True, tape_dtype="float64")
    assert wide == 4 * pairs * 128 + 2 * T * heads * 8


def test_workspace_bytes_name_their_roles() -> None:
    """E 256 and dS 512 a token and value head; without the full set e and S once more."""
    T, value_heads = 8192, 4
    full = gdn_workspace_bytes(T, 1, 2, value_heads)
    assert full == {"E": 256 * T * value_heads, "dS": 512 * T * value_heads, "replay": 0}
    for save in ("light", "none"):
        assert gdn_workspace_bytes(T, 1, 2, value_heads, save=save)["replay"] == 768 * T * value_heads


def test_the_package_its_declaration_and_its_plan_load_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import cake_gdn, cake_gdn.op, cake_gdn.plan; "
        "from cake_gdn import check_supported, gdn_saved_bytes, gdn_workspace_bytes; check_supported(16, 64); "
        "import cake_gdn.testing.shapes, cake_gdn.testing.budgets; "
        "gdn_saved_bytes(64, 1, 1, 1, save='full', use_qk_l2norm_in_kernel=True); gdn_workspace_bytes(64, 1, 1, 1); "
        "from cake_core.kcp import partition_kcp; partition_kcp((0, 64), 2); print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
