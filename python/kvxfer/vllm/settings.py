"""Reads `--kv-transfer-config`. Every field is honoured or refused by name; none is ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from kvxfer.errors import BadArgument, NotSupported

__all__ = [
    "DEFAULT_PORT",
    "NOT_SET",
    "NOT_USED",
    "Settings",
    "read_settings",
    "refuse_fields",
    "split_address",
]

DEFAULT_PORT = 8998

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
MissingRoom = Literal["compute", "reject"]
Fabric = Literal["auto", "shm", "ucx"]
Staging = Literal["auto", "always", "never"]
Verify = Literal["full", "sample"]
Unit = Literal["tile", "block"]

_AGENT_ROLES: dict[str, Literal["prefill", "decode", "both"]] = {
    "kv_producer": "prefill",
    "kv_consumer": "decode",
    "kv_both": "both",
}

# Fields of vLLM's own, over all versions that are supported, with the value that says nothing and what to
# use.
NOT_USED: dict[str, tuple[tuple[object, ...], str]] = {
    "kv_port": ((14579, None), "set `directory` (host:port) in kv_connector_extra_config"),
    "kv_ip": (("127.0.0.1", None), "set `listen` and `directory` in kv_connector_extra_config"),
    "kv_rank": ((None, 0), "ranks come from tensor parallelism, and the two sides need no numbers"),
    "kv_parallel_size": ((1, None), "any number of engines may take part, none needs to be told how many"),
    "enable_permute_local_kv": ((False, None), "layouts that differ are converted as they are moved"),
}
_DEVICES = ("cpu",)

# Fields of `Settings` that are no keys of kv_connector_extra_config.
NOT_SET = {"role", "engine", "dp_index", "dp_size"}

# Keys that only some roles look at, and what to do about them elsewhere.
_ONLY_IN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "directory",
        ("kv_producer", "kv_both"),
        "a decode engine is told its prefill engine's directory by each request (source); leave it out",
    ),
    (
        "on_missing_room",
        ("kv_producer", "kv_consumer"),
        "requests without a room are at home on such a server and always computed; leave it out",
    ),
    ("verify", ("kv_consumer", "kv_both"), "decode asks for checksums; set it there"),
)


@dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`, with what was left out filled in."""

    role: Role
    engine: str
    # Where each rank's agent listens: a host, or host:port for rank 0 of a decode engine.
    listen: str
    # Where the others find this engine's rank 0.
    directory: str
    timeout_s: float
    on_missing_room: MissingRoom
    fabric: Fabric
    secret_file: str | None
    insecure: bool
    verify: Verify | None
    staging: Staging
    ucx_tls: str | None
    model: str | None
    unit: Unit
    cpu: int | None
    quarantine_limit: int | None
    evict_file: str | None
    dp_index: int = 0
    dp_size: int = 1

    @property
    def prefills(self) -> bool:
        """Whether prompts may be computed here for other engines."""
        return self.role != "kv_consumer"

    @property
    def decodes(self) -> bool:
        """Whether prompts may be taken from other engines."""
        return self.role != "kv_producer"

    @property
    def agent_role(self) -> Literal["prefill", "decode", "both"]:
        """The role of the agents."""
        return _AGENT_ROLES[self.role]

    def agent_listen(self, rank: int) -> str:
        """Where the agent of a rank listens: rank 0 of an engine that prefills on the directory's port."""
        host, port = split_address(self.listen)
        if rank != 0:
            return join_address(host, 0)
        if self.prefills:
            return join_address(host, split_address(self.directory)[1] or DEFAULT_PORT)
        return join_address(host, port + self.dp_index if port else 0)


def split_address(text: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[v6]:port` or a bare IPv6 address, taken apart."""
    host, port = text, ""
    if text.startswith("["):
        host, found, rest = text[1:].partition("]")
        if not found or (rest and not rest.startswith(":")):
            raise BadArgument(f"{text!r} is no address: expected [v6]:port")
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host:
        raise BadArgument(f"{text!r} is no address: it has no host")
    if not port:
        return host, None
    if not port.isdigit() or int(port) > 65535:
        raise BadArgument(f"{text!r} is no address: {port!r} is no port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """An address that can be taken apart again."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refuse_fields(config: object) -> None:
    """Raises for fields of vLLM's `KVTransferConfig` that were set and that nothing here would look at.

    Raises:
        BadArgument: for a field that has no meaning here, with what to use in its place.
        NotSupported: for a `kv_buffer_device` that is not the CPU.
    """
    for name, (silent, instead) in NOT_USED.items():
        value = getattr(config, name, None)
        if value not in silent:
            raise BadArgument(
                f"kv-transfer-config: {name}={value!r} is not used by KvxferConnector: {instead}"
            )
    device = getattr(config, "kv_buffer_device", None)
    if device not in (None, *_DEVICES):
        raise NotSupported(
            f"kv-transfer-config: kv_buffer_device={device!r}: KvxferConnector moves pages in host memory"
            " only so far; run vLLM on the CPU, or leave the field out"
        )


def read_settings(
    extra: Mapping[str, Any],
    *,
    role: str,
    engine: str,
    dp_index: int = 0,
    dp_size: int = 1,
) -> Settings:
    """Reads `kv_connector_extra_config`.

    Args:
        extra: the keys that the user gave.
        role: `kv_role`.
        engine: `engine_id`, the name by which other engines know this one.
        dp_index: index of this data-parallel engine, which is added to the directory's and to decode's port.
        dp_size: how many of them there are.

    Raises:
        BadArgument: for a key that is not known, a value out of range, or keys that clash.
    """
    if role not in get_args(Role):
        raise BadArgument(f"kv_role={role!r}: must be one of {', '.join(get_args(Role))}")
    left = dict(extra)
    _refuse_in_role(left, role)
    listen = _text(left, "listen") or "127.0.0.1"
    host, listen_port = split_address(listen)
    directory = _text(left, "directory")
    prefills = role != "kv_consumer"
    if prefills and listen_port is not None:
        raise BadArgument(
            f"listen={listen!r}: give an engine that prefills a host only; its port is that of `directory`"
        )
    if directory is None:
        if prefills and host in ("0.0.0.0", "::"):
            raise BadArgument(
                f"listen={listen!r} without `directory`: decode engines need an address that they can reach;"
                f" set directory to this host's name or address, with a port if not {DEFAULT_PORT}"
            )
        directory = host
    directory_host, directory_port = split_address(directory)
    port = (DEFAULT_PORT if directory_port is None else directory_port) + dp_index
    if prefills and not 0 < port <= 65535:
        raise BadArgument(f"directory={directory!r}: the port must be fixed, since others are told of it")
    if listen_port and listen_port + dp_index > 65535:
        raise BadArgument(f"listen={listen!r}: data-parallel engine {dp_index} has no port after it")
    on_missing_room = cast(MissingRoom, _choice(left, "on_missing_room", get_args(MissingRoom), "compute"))
    verify = _choice(left, "verify", ("full", "sample", "none"), "none")
    settings = Settings(
        role=cast(Role, role),
        engine=engine,
        listen=listen,
        directory=join_address(directory_host, port),
        timeout_s=_seconds(left, "timeout_s", 300.0),
        on_missing_room=on_missing_room,
        fabric=cast(Fabric, _choice(left, "fabric", get_args(Fabric), "auto")),
        secret_file=_text(left, "secret_file"),
        insecure=_flag(left, "insecure"),
        verify=None if verify == "none" else cast(Verify, verify),
        staging=cast(Staging, _choice(left, "staging", get_args(Staging), "auto")),
        ucx_tls=_text(left, "ucx_tls"),
        model=_text(left, "model"),
        unit=cast(Unit, _choice(left, "unit", get_args(Unit), "tile")),
        cpu=_index(left, "cpu", "the number of a core"),
        quarantine_limit=_index(left, "quarantine_limit", "a number of pages"),
        evict_file=_text(left, "evict_file"),
        dp_index=dp_index,
        dp_size=dp_size,
    )
    if left:
        known = sorted(set(Settings.__dataclass_fields__) - NOT_SET)
        raise BadArgument(
            f"kv_connector_extra_config has {', '.join(map(repr, sorted(left)))}, which KvxferConnector does"
            f" not know; it knows {', '.join(known)}"
        )
    return settings


def _text(left: dict[str, Any], key: str) -> str | None:
    value = left.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise BadArgument(f"{key}={value!r}: must be a text that is not empty")
    return value


def _choice(left: dict[str, Any], key: str, choices: tuple[str, ...], default: str) -> str:
    value = left.pop(key, default)
    if value not in choices:
        raise BadArgument(f"{key}={value!r}: must be one of {', '.join(choices)}")
    return cast(str, value)


def _seconds(left: dict[str, Any], key: str, default: float) -> float:
    value = left.pop(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise BadArgument(f"{key}={value!r}: must be a number of seconds above 0")
    return float(value)


def _flag(left: dict[str, Any], key: str) -> bool:
    value = left.pop(key, False)
    if not isinstance(value, bool):
        raise BadArgument(f"{key}={value!r}: must be true or false")
    return value


def _index(left: dict[str, Any], key: str, what: str) -> int | None:
    value = left.pop(key, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise BadArgument(f"{key}={value!r}: must be {what}, 0 or more")
    return value


def _refuse_in_role(extra: Mapping[str, Any], role: str) -> None:
    """Raises for keys that nothing would look at in this role, or next to another key."""
    for key, roles, why in _ONLY_IN:
        if extra.get(key) is not None and role not in roles:
            raise BadArgument(f"{key} has no meaning for kv_role={role!r}: {why}")
    for key in ("staging", "ucx_tls"):
        if extra.get(key) is not None and extra.get("fabric") == "shm":
            raise BadArgument(f"{key} has no meaning with fabric='shm': it is about UCX")
