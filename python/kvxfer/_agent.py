"""`kvxfer.Agent`: prepares the arguments of the compiled agent, whose methods it has otherwise."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn

from kvxfer import _kvxfer
from kvxfer._kvxfer import Event, PageLayout, Shard, Unreleased
from kvxfer._memory import Layouts, Pool, groups_of, prepare, ucx_wheel_dir
from kvxfer._rails import Rails, for_agent, ucx_devices
from kvxfer._security import Limits, Tls, tls_files, warn_if_open
from kvxfer.errors import AuthError, BadArgument

if TYPE_CHECKING:
    from kvxfer._async import Loops

_EXIT_WAIT_S = 0.5

_live: weakref.WeakSet[Agent] = weakref.WeakSet()


class Agent(_kvxfer.Agent):
    """Registered memory, a control port and a transfer thread: one rank's end of every hand-off.

    When it is made, its memory is registered and its port is open; a failed start leaves nothing behind.
    `push`, `expect`, `open`, `retract`, `cancel` and `poll` never block and may be called from any thread.

    * `name` is for people; `engine` (default: the name) is the engine that the rank belongs to, `dp_rank` its
      data-parallel rank there.
    * `layout` is a `PageLayout`, or a list of them, one a group; `shard` says which part of it this rank
      holds.
    * `memory` is a `Pool`, or tensors for each layer that the rank holds: a list in the order of layers or
      a dict by layer; with a list of layouts a list of those, one a group, or a dict by `(group, layer)`. An
      entry is a pair `(k, v)` for `kind="kv"`, else one tensor. A tensor is a C-contiguous numpy array, a
      torch tensor, anything with `__dlpack__`, `__cuda_array_interface__` or a writable buffer, or a raw pair
      `(address, nbytes)` of the host's memory or a `DeviceMemory`, whose owner is the caller's to keep.
      Memory of a GPU is asked of the CUDA driver, must be of one device, and goes over UCX; docs/gpu.md says
      what does not work there yet. Its dtype and shape do not matter, its bytes are taken to be pages
      in the layout's order; all regions of a group have the same number of pages. What owns the memory is
      kept alive until the agent is closed.
    * `listen` is `"host:port"`; port 0 lets the system choose, see `address`. An address that is not loopback
      needs a secret or TLS.
    * `directory` is the address of the engine's rank 0, with which the others register; None for rank 0
      itself.
    * `role` is `"both"`, `"prefill"` (only pushes; its memory may be read-only) or `"decode"` (only expects).
    * `model` is a fingerprint that both sides must have in common.
    * `fabric` is `"shm"`, `"ucx"` or `"auto"` (for each peer: shared memory on the same host, else UCX);
      `ucx_tls` names UCX's transports instead of kvxfer's choice.
    * `rails` names the RDMA cards (`"mlx5_0"`, or a port, `"mlx5_0:1"`) that UCX is held to; a write goes
      over all of them if UCX can. None is the card nearest to the GPU that the memory is on (memory of the
      host: all cards, by UCX's choice), unless `UCX_NET_DEVICES` is set; `[]` leaves it to UCX. The attribute
      `rails` says which, and why.
    * `secret` (str or bytes) must be the same on both sides; None takes it from the file
      `KVXFER_SECRET_FILE`, else from `KVXFER_SECRET`.
    * `tls` is a `Tls` with the paths of certificates, also on both sides; None takes them from
      `KVXFER_TLS_CERT`, `KVXFER_TLS_KEY` and `KVXFER_TLS_CA`. `insecure=True` listens on any address, and
      speaks to agents on other hosts, with neither; it warns, since whoever reaches the port can then read
      and write the pages. `limits` is a `Limits`: what others may use up.
    * `cpu` pins the transfer thread to a core; it spins `spin_us` microseconds before it sleeps, by default
      50, and not at all once it has told of the last room's end; `queue_capacity` orders may wait for it;
      `slice_bytes` is how much it moves for one room before the next one has its turn.
    * `staging` says whether pushes that fall into many small runs go over UCX packed, one write a slice,
      through slots of the receiver: `"auto"` where that is faster by what was measured when the peers
      connected, `"always"` wherever the receiver lends slots, `"never"`. The receiver lends from a ring of
      `staging_slots` slots of `staging_slot_bytes` bytes, whose memory is allocated when the first peer with
      such small runs connects (any peer with `"always"`, none with `"never"`). To force it, say so on both
      sides. A slice is the smaller of the sender's `slice_bytes` and the receiver's `staging_slot_bytes` (at
      most 16 MiB), and one sender has half of the ring at most.
    * `heartbeat`, `suspect_after` and `fence_after` are seconds (1, 5 and 10): how often peers hear from each
      other, when a silent connection is made anew, and when a peer that cannot be reached is fenced.
      `quarantine_limit` is how many pages may wait for silent peers before the agent takes no new rooms.
      Staging slots that wait (`quarantined_slots` in `stats`) do not count: pushes are single writes then.

    `_flaw` breaks a rule on purpose, for `kvxfer stress --break`: never set it where bytes matter.

    Raises `BadArgument` (also for memory that does not fit the layout), `NotSupported` (memory of a GPU that
    cannot be exported, or that is not CUDA's), `ListenError`, `AuthError`, `FabricError`, and TypeError for
    a `memory` of another type.

    Used as a context manager it closes itself; dropped unclosed, or at the interpreter's exit, too, after
    half a second at most.

    >>> import kvxfer as kx
    >>> layout = kx.PageLayout(layers=2, kv_heads=4, head_dim=64, page_tokens=16, dtype="float16")
    >>> source, target = kx.alloc(layout, kx.Shard(), pages=8), kx.alloc(layout, kx.Shard(), pages=8)
    >>> source.k(0)[5] = 1.5
    >>> with (
    ...     kx.Agent("prefill-0", layout, kx.Shard(), memory=source) as prefill,
    ...     kx.Agent("decode-0", layout, kx.Shard(), memory=target) as decode,
    ... ):
    ...     room = kx.new_room()
    ...     decode.expect(room, [2, 7], tokens=20, source=prefill.address)
    ...     push = prefill.push(room, [5, 1], tokens=20, meta=b"first token: 42")
    ...     event = decode.wait(room, timeout=30)
    >>> event.state, event.released, event.meta, float(target.k(0)[2, 0, 0, 0])
    ('Success', True, b'first token: 42', 1.5)
    """

    _loops: Loops
    _rails: Rails

    def __new__(
        cls,
        name: str,
        layout: Layouts,
        shard: Shard,
        *,
        memory: object,
        listen: str = "127.0.0.1:0",
        directory: str | None = None,
        engine: str | None = None,
        dp_rank: int = 0,
        role: Literal["both", "prefill", "decode"] = "both",
        model: str | None = None,
        fabric: Literal["auto", "shm", "ucx"] = "auto",
        secret: str | bytes | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        cpu: int | None = None,
        queue_capacity: int = 4096,
        spin_us: int | None = None,
        ucx_tls: str | None = None,
        rails: Sequence[str] | None = None,
        heartbeat: float | None = None,
        suspect_after: float | None = None,
        fence_after: float | None = None,
        quarantine_limit: int | None = None,
        slice_bytes: int | None = None,
        staging: Literal["auto", "always", "never"] = "auto",
        staging_slots: int = 32,
        staging_slot_bytes: int = 262144,
        _flaw: str | None = None,
    ) -> Agent:
        if not isinstance(layout, PageLayout):
            layout = groups_of(layout)
        regions, pages, owner, devices = prepare(memory, layout, shard, read_only=role == "prefill")
        if isinstance(memory, Pool) and memory.fabric == "ucx":
            # UCX registers memory per choice of transports: to another one the pool is foreign, and slow.
            if ucx_tls is None:
                ucx_tls = memory.ucx_tls
            elif ucx_tls != memory.ucx_tls:
                raise BadArgument(
                    f"ucx_tls={ucx_tls!r}, but the pool was allocated for {memory.ucx_tls!r}: "
                    "give both the same"
                )
        device = next((n for n in devices or () if n is not None), None)
        chosen = for_agent(rails, device=device, fabric=fabric, ucx_tls=ucx_tls)
        key, files = _secret(secret), tls_files(tls)
        self = super().__new__(
            cls,
            name,
            layout,
            shard,
            regions,
            pages,
            owner,
            listen=listen,
            directory=directory,
            engine=engine,
            dp_rank=dp_rank,
            role=role,
            model=model,
            fabric=fabric,
            secret=key,
            tls=files,
            insecure=insecure,
            limits=None if limits is None else asdict(limits),
            cpu=cpu,
            queue_capacity=queue_capacity,
            spin_us=spin_us,
            ucx_tls=ucx_tls,
            ucx_wheel_dir=ucx_wheel_dir(),
            heartbeat=heartbeat,
            suspect_after=suspect_after,
            fence_after=fence_after,
            quarantine_limit=quarantine_limit,
            slice_bytes=slice_bytes,
            staging=staging,
            staging_slots=staging_slots,
            staging_slot_bytes=staging_slot_bytes,
            devices=devices,
            ucx_devices=ucx_devices(chosen),
            flaw=_flaw,
        )
        self._rails = chosen
        self._loops = {}
        if insecure and key is None and files is None:
            warn_if_open(self.address)
        _live.add(self)
        return self

    @property
    def rails(self) -> Rails:
        """The RDMA cards that its UCX is held to: `names` (none: UCX chooses) and `why`."""
        return self._rails

    async def wait_async(self, room: int) -> Event:
        """Like `wait`, for asyncio: returns the room's `"Success"` or raises its error, and takes nothing
        from `poll`.

        Any number of tasks, on any number of event loops, may wait. Cancelling the wait (`asyncio.timeout`,
        `wait_for`) leaves the room as it is.
        """
        # Only who awaits pays for asyncio.
        from kvxfer._async import wait_async

        return await wait_async(self, self._loops, room)

    def close(self, timeout: float = 5.0) -> list[Unreleased]:
        """Cancels every room, waits up to `timeout` seconds until no peer can touch the memory, and stops.

        Returns the rooms whose pages are still not free, with their pages and the names of the peers that
        have not answered (incarnations in hex, where no name is known); if there are any, the memory is kept
        for as long as the process lives. May be called again.
        """
        unreleased = super().close(timeout)
        for waiter in list(self._loops.values()):
            waiter.look_soon()
        return unreleased

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Agent cannot be pickled or copied: make one in each process")


def _secret(secret: str | bytes | None) -> bytes | None:
    """The shared secret from the argument, `KVXFER_SECRET_FILE` or `KVXFER_SECRET`."""
    where = "secret"
    if secret is None:
        path = os.environ.get("KVXFER_SECRET_FILE")
        if path:
            where = f"the secret in {path} (KVXFER_SECRET_FILE)"
            try:
                # Editors end the last line; no secret does.
                secret = Path(path).read_bytes().rstrip(b"\r\n")
            except OSError as error:
                raise AuthError(f"{where} cannot be read: {error.strerror}") from error
        else:
            where = "KVXFER_SECRET"
            secret = os.environb.get(b"KVXFER_SECRET")
            if secret is None:
                return None
    if isinstance(secret, str):
        secret = secret.encode()
    elif not isinstance(secret, bytes):
        raise TypeError(f"secret is str or bytes, not {type(secret).__name__}")
    if not secret:
        raise BadArgument(f"{where} is empty: leave it out, or give at least one byte")
    return secret


@atexit.register
def _close_all() -> None:
    """Ends transfer threads while the interpreter still works, so that its end waits for nothing."""
    for agent in list(_live):
        agent.close(_EXIT_WAIT_S)
