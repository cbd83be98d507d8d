"""SHA-256 of the outputs that are promised not to change: the frozen bits of the CUDA kernels.

Lanes, partitions and the order of every sum are part of what ``det`` promises between releases. A release that changes
one of these hashes changes results bit for bit, and says so in its changelog.
"""

from __future__ import annotations

__all__ = ["EPS", "GATED_RMSNORM", "RMSNORM"]

EPS = 1e-6

# (rows, H, weight) -> hashes of y, rstd, dx, dweight. One of each kind of row: one to four vectors a lane, below a
# warp, a warp, several warps; one and several partial rows. They are IEEE arithmetic alone, so every architecture and
# the emulation on the CPU have them.
RMSNORM: dict[tuple[int, int, str], tuple[str, str, str, str]] = {
    (37, 8, "fp32"): ("bd10f16b2a134147", "e37becd9fea48870", "34baee3ad934c6f6", "309180437e3bc935"),
    (300, 128, "bf16"): ("ebeecffc3c462397", "df162fe0bc573334", "a2c1368c81b4c41f", "8936107ac90b687e"),
    (133, 256, "fp32"): ("a71206bd1acc724a", "29d8b98113d3d0f6", "ed5d0b6d8f4d4ab1", "ba97d6467868a733"),
    (133, 1000, "bf16"): ("9f9af2848988e5fe", "5057dbb6bdc9b0b2", "51ccbb7d5d6a3837", "602105d78534c62b"),
    (40, 1536, "fp32"): ("35149b4f59098fef", "e842b6eac73ec1d2", "c635d9d42a50b7d4", "5b9abdd483ef1c78"),
    (40, 2048, "bf16"): ("fe6f95b1f6a8408d", "e0de77f7a96197aa", "7900ae2a396fbd26", "817095c6b885a0c2"),
    (40, 2304, "fp32"): ("3921be939a164f50", "c6a827d5dfc93b82", "4592fb1212259615", "7f463e67ec187a4c"),
    (40, 2560, "bf16"): ("424ddbd3b9c36653", "352fa8bcee3d506c", "76d50dfeba835550", "fa90266a1fb42fb6"),
    (40, 4096, "fp32"): ("ed262c14949b7fd7", "48c2408713be9c20", "de4e15f0e5219f1a", "a50e27561cf9683e"),
    (9, 7168, "bf16"): ("abd0ef66957ab526", "c0745026758039c3", "cdf7ab551cbc47d3", "1f624a99e365bcaf"),
    (5, 16384, "fp32"): ("af83004a488ccb8f", "6aa8602b8b78abc9", "71ccf9c80ec49545", "e352fc15d0751f1d"),
}

# (tokens, heads, D, activation, weight) -> hashes of y, dx, dz, dweight. ex2.approx and rcp.approx are in them: they
# are promised for devices of compute capability 9.0.
GATED_RMSNORM: dict[tuple[int, int, int, str, str], tuple[str, str, str, str]] = {
    (7, 3, 64, "sigmoid", "bf16"): ("e13c0fa0876c15b2", "46734d67862a678b", "a41d6836395025da", "a0cc41f4efebdbc5"),
    (133, 12, 128, "silu", "fp32"): ("e3862927d1fe0d9e", "184bfde8f428df46", "babbd69338497cb6", "5e82aa74e66f7d23"),
    (700, 32, 128, "silu", "bf16"): ("dbe4c915020921b0", "7c8cf0b94f249f7f", "74d1e422a5c0a110", "497f1c5cb94d2ba8"),
    (133, 4, 256, "sigmoid", "fp32"): ("c1fbc42f08b9fda6", "e584349cd1fd81d2", "51a8a99a90a82e74", "12b87fba17c85554"),
}
