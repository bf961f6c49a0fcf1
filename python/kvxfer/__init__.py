"""Hands a request's paged KV cache from a prefill engine to a decode engine without touching either engine's
loop.

Decode grants pages with `Agent.expect`, prefill delivers into them with `Agent.push`, and both learn how it
went from `Agent.poll` (or `wait`, `wait_async`, or a descriptor, `fileno`). Everything else happens on the
agent's transfer thread, which never takes the GIL. `Agent`'s documentation has an example.

One rule matters more than all others: pages that were granted or pushed may be reused only after the event of
their room that has `released` set.
"""

from __future__ import annotations

import os

from kvxfer import _kvxfer, errors, plan
from kvxfer._agent import Agent
from kvxfer._device import DeviceMemory
from kvxfer._kvxfer import (
    Event,
    PageLayout,
    Plan,
    Push,
    RoomStats,
    Shard,
    Unreleased,
    __version__,
    new_room,
    plan_transfer,
)
from kvxfer._layout import StateBlock
from kvxfer._memory import Pool, alloc
from kvxfer._rails import Rails
from kvxfer._security import Limits, Tls
from kvxfer.errors import (
    AgentClosed,
    AuthError,
    BadArgument,
    Cancelled,
    ChecksumMismatch,
    FabricError,
    Forked,
    InternalError,
    KvxferError,
    LayoutMismatch,
    ListenError,
    NotSupported,
    PageError,
    PeerLost,
    PoolFull,
    ProtocolError,
    QueueFull,
    RoomInUse,
    StaleGrant,
    TokensMismatch,
    TransferTimeout,
    Unhealthy,
    UnknownRoom,
    VersionMismatch,
    WaitTimeout,
)
from kvxfer.pages import PagePool

__all__ = [
    "Agent",
    "AgentClosed",
    "AuthError",
    "BadArgument",
    "Cancelled",
    "ChecksumMismatch",
    "DeviceMemory",
    "Event",
    "FabricError",
    "Forked",
    "InternalError",
    "KvxferError",
    "LayoutMismatch",
    "Limits",
    "ListenError",
    "NotSupported",
    "PageError",
    "PageLayout",
    "PagePool",
    "PeerLost",
    "Plan",
    "Pool",
    "PoolFull",
    "ProtocolError",
    "Push",
    "QueueFull",
    "Rails",
    "RoomInUse",
    "RoomStats",
    "Shard",
    "StaleGrant",
    "StateBlock",
    "Tls",
    "TokensMismatch",
    "TransferTimeout",
    "Unhealthy",
    "UnknownRoom",
    "Unreleased",
    "VersionMismatch",
    "WaitTimeout",
    "__version__",
    "alloc",
    "errors",
    "new_room",
    "plan",
    "plan_transfer",
]

# A forked child has neither the transfer threads nor the memory of its parent's agents: they say so there.
os.register_at_fork(after_in_child=_kvxfer._after_fork_in_child)
