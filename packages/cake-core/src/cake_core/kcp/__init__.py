"""Context parallelism (KCP): how a batch is cut over the ranks, what a rank knows about the cut, how rows travel.

It knows no op's math: conv1d, gdn and kda say which rows they send and what they do with them. Importing it, cutting a
batch (``partition_kcp``) and planning a halo (``halo_plan``) load no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .context import HaloTables as HaloTables
    from .context import KcpContext as KcpContext
    from .context import build_context_kcp as build_context_kcp
    from .exchange import Exchange as Exchange
    from .exchange import GroupExchange as GroupExchange
    from .exchange import Work as Work
    from .fla import context_from_fla as context_from_fla
    from .halo import HaloPlan as HaloPlan
    from .halo import halo_plan as halo_plan
    from .local import LocalExchange as LocalExchange
    from .partition import KcpFragment as KcpFragment
    from .partition import KcpPartition as KcpPartition
    from .partition import partition_kcp as partition_kcp
    from .recompute import Recompute as Recompute
    from .recompute import RecomputeHandle as RecomputeHandle
    from .recompute import bind_recompute as bind_recompute
    from .rows import gather_kcp as gather_kcp
    from .rows import scatter_kcp as scatter_kcp
    from .state import ChainLink as ChainLink
    from .state import StateTables as StateTables
    from .state import exchange_rows as exchange_rows
    from .state import gather_fragments as gather_fragments
    from .state import must_exchange as must_exchange
    from .state import state_tables as state_tables

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ChainLink": ".state",
        "Exchange": ".exchange",
        "GroupExchange": ".exchange",
        "HaloPlan": ".halo",
        "HaloTables": ".context",
        "KcpContext": ".context",
        "KcpFragment": ".partition",
        "KcpPartition": ".partition",
        "LocalExchange": ".local",
        "Recompute": ".recompute",
        "RecomputeHandle": ".recompute",
        "StateTables": ".state",
        "Work": ".exchange",
        "bind_recompute": ".recompute",
        "build_context_kcp": ".context",
        "context_from_fla": ".fla",
        "exchange_rows": ".state",
        "gather_fragments": ".state",
        "gather_kcp": ".rows",
        "halo_plan": ".halo",
        "must_exchange": ".state",
        "partition_kcp": ".partition",
        "scatter_kcp": ".rows",
        "state_tables": ".state",
    },
)
