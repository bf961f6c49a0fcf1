"""`kvxfer.Tls` and `kvxfer.Limits`: who may speak to an agent, and how much they may use up."""

from __future__ import annotations

import ipaddress
import os
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

from kvxfer.errors import BadArgument

# An honest peer's frames must pass; the engine checks the same.
_LEAST_FRAME_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Tls:
    """Mutual TLS 1.3 on an agent's control channel. Frozen.

    Both sides of every connection show a certificate and check the other's against the authority; every frame
    is then encrypted and authenticated. All peers need it, or none: an agent with TLS refuses one without,
    and the other way round. A secret may be used besides; then both must hold.

    * `cert` is the path of this agent's certificate (PEM; intermediate ones after it), `key` that of its
      private key, `ca` that of the authorities whose certificates are taken. They are read when the agent
      starts. Agents connect both ways: a certificate with an extended key usage needs serverAuth and
      clientAuth.
    * `name` is the DNS name (or IP address) that every peer's certificate must carry. None asks the host that
      was dialled of who is dialled, and only the authority's signature of who dials; the addresses are those
      that agents listen on, or the one they are reached at if they listen on all.

    Without the argument `tls` an agent takes the paths from `KVXFER_TLS_CERT`, `KVXFER_TLS_KEY`,
    `KVXFER_TLS_CA` and the name from `KVXFER_TLS_NAME`, if the first three are set.

    >>> import kvxfer as kx
    >>> kx.Tls(cert="agent.pem", key="agent.key", ca="ca.pem", name="kvxfer.internal").name
    'kvxfer.internal'
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What strangers and peers may use up of an agent before it closes their connections. Frozen.

    Of strangers (connections in their handshake) and of all connections:

    * `connections`: connections in all; `connections_per_address`: of those, accepted from one address (one
      /64 of IPv6); `connections_per_peer`: of those, with one authenticated peer.
    * `handshakes`, `handshakes_per_address`: connections that have not passed their handshake; one more
      closes the oldest one of the address that has most.
    * `handshake_timeout`: seconds within which the handshake must be over.

    Of authenticated peers:

    * `frame_bytes`: bytes of one frame, at least 64 KiB (before authentication it is 4 KiB, for a description
      16 MiB). A grant has 4 bytes for each page of its room: keep well above the longest, since one that is
      longer is refused each time it is sent.
    * `frame_timeout`: seconds within which a frame that has begun must be whole, and one more for each MiB.
    * `unread_bytes`: bytes that may wait for a peer to read them.
    * `requests_per_second`: pings, look-ups, registrations and attachments of one connection, on average; ten
      times as many may come at once.
    * `registrations`: ranks in the directory; `peers`: peers that are known.
    * `early_grants`: granted rooms that may wait for a push in all; `early_grants_per_peer` and
      `early_pages_per_peer`: of those, with one peer, and the pages in their lists.
    * `tombstones`: failed rooms that are remembered; `tombstones_per_peer`: of those, at one peer's word.

    Raises `BadArgument` for a limit below 1, `frame_bytes` below 65536, or a time that is not positive.
    """

    connections: int = 16_384
    connections_per_address: int = 4096
    connections_per_peer: int = 64
    handshakes: int = 256
    handshakes_per_address: int = 128
    handshake_timeout: float = 10.0
    frame_bytes: int = 64 << 20
    frame_timeout: float = 10.0
    unread_bytes: int = 256 << 20
    requests_per_second: int = 50
    registrations: int = 4096
    peers: int = 16_384
    early_grants: int = 65_536
    early_grants_per_peer: int = 16_384
    early_pages_per_peer: int = 16 << 20
    tombstones: int = 65_536
    tombstones_per_peer: int = 16_384

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_timeout"):
                if not 0 < value < 1e9:
                    raise BadArgument(f"{field.name}={value!r}: it is seconds, above 0 and below 1e9")
            elif not 1 <= value < 1 << 32:
                raise BadArgument(f"{field.name}={value!r}: it is at least 1 and below 2**32")
        if self.frame_bytes < _LEAST_FRAME_BYTES:
            raise BadArgument(
                f"frame_bytes={self.frame_bytes!r}: it is at least {_LEAST_FRAME_BYTES}, and more than 4 "
                "bytes for each page of the longest room"
            )


def tls_files(tls: Tls | None) -> tuple[Path, Path, Path, str | None] | None:
    """The argument, or what the environment names."""
    if tls is None:
        names = ("KVXFER_TLS_CERT", "KVXFER_TLS_KEY", "KVXFER_TLS_CA")
        paths = [os.environ.get(name) for name in names]
        if not any(paths):
            return None
        if missing := [name for name, path in zip(names, paths, strict=True) if not path]:
            raise BadArgument(f"{' and '.join(missing)} is not set: TLS needs all of {', '.join(names)}")
        cert, key, ca = (Path(path) for path in paths if path)
        return cert, key, ca, os.environ.get("KVXFER_TLS_NAME") or None
    if not isinstance(tls, Tls):
        raise TypeError(f"tls is a kvxfer.Tls, not {type(tls).__name__}")
    return Path(tls.cert), Path(tls.key), Path(tls.ca), tls.name


def warn_if_open(address: str) -> None:
    """Warns that whoever reaches this address is let in."""
    host = address.rpartition(":")[0].strip("[]")
    ip = ipaddress.ip_address(host)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    if not (mapped or ip).is_loopback:
        text = (
            f"insecure=True: {address} is open to other hosts, with neither a secret nor TLS. "
            "Whoever reaches it can read and write the KV pages"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=3)
