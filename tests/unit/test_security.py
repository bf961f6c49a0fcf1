"""`Tls`, `Limits` and `insecure`: what they take, what they refuse, and the words."""

from __future__ import annotations

import dataclasses
import pickle
import re
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest

import kvxfer as kx

LAYOUT = kx.PageLayout(layers=1, kv_heads=2, head_dim=8, page_tokens=4, dtype="float16")


def agent(**given: Any) -> kx.Agent:
    return kx.Agent(
        "a", LAYOUT, kx.Shard(), memory=kx.alloc(LAYOUT, kx.Shard(), pages=1), fabric="shm", **given
    )


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.7:0", "[::ffff:192.0.2.7]:0"])
def test_an_open_address_is_refused_and_the_message_teaches(listen: str) -> None:
    with pytest.raises(kx.AuthError) as caught:
        agent(listen=listen)
    for word in ("secret=", "tls=", "insecure=True", "KVXFER_SECRET_FILE", "other hosts"):
        assert word in str(caught.value)


def test_insecure_listens_anywhere_and_warns_where_it_matters() -> None:
    with pytest.warns(RuntimeWarning, match="insecure=True: 0.0.0.0:") as caught:
        agent(listen="0.0.0.0:0", insecure=True).close()
    assert caught[0].filename == __file__, "the warning points at who wrote it"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent(listen="127.0.0.1:0", insecure=True).close()
        agent(listen="0.0.0.0:0", insecure=True, secret="s").close()


def test_tls_is_frozen_and_its_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = kx.Tls(cert=tmp_path / "a.pem", key=tmp_path / "a.key", ca=tmp_path / "ca.pem")
    assert pickle.loads(pickle.dumps(tls)) == tls
    assert hash(tls) == hash(dataclasses.replace(tls))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tls.name = "x"  # type: ignore[misc]
    with pytest.raises(kx.AuthError, match=r"cert=.*a\.pem.*No such file"):
        agent(tls=tls)
    with pytest.raises(TypeError, match=r"tls is a kvxfer\.Tls, not tuple"):
        agent(tls=("a", "b", "c"))
    monkeypatch.setenv("KVXFER_TLS_CERT", str(tmp_path / "env.pem"))
    with pytest.raises(kx.BadArgument, match="KVXFER_TLS_KEY and KVXFER_TLS_CA is not set"):
        agent()
    monkeypatch.setenv("KVXFER_TLS_KEY", "k")
    monkeypatch.setenv("KVXFER_TLS_CA", "c")
    with pytest.raises(kx.AuthError, match=r"cert=.*env\.pem"):
        agent()


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(kx.Limits)])
def test_every_limit_is_checked_and_reaches_the_engine(name: str) -> None:
    with pytest.raises(kx.BadArgument, match=name):
        kx.Limits(**{name: 0})
    with pytest.raises(kx.BadArgument, match=name):
        kx.Limits(**{name: 1 << 40})
    enough = 1 << 16 if name == "frame_bytes" else 1000
    agent(limits=kx.Limits(**{name: enough})).close()
    if name == "frame_bytes":
        with pytest.raises(kx.BadArgument, match="frame_bytes=65535: it is at least 65536"):
            kx.Limits(frame_bytes=enough - 1)


def test_the_defaults_are_the_engines_and_the_documented_ones() -> None:
    root = Path(__file__).parents[2]
    engine = (root / "rust/kvxfer-engine/src/control/limits.rs").read_text()
    node = (root / "rust/kvxfer-proto/src/node/types.rs").read_text()
    wire = (root / "rust/kvxfer-proto/src/wire/mod.rs").read_text()
    table = (root / "SECURITY.md").read_text()
    for field in dataclasses.fields(kx.Limits):
        said = re.search(
            rf"\b{field.name}: ([\w<> :()]+),", engine.partition("fn default")[2].partition("\n}")[0]
        )
        said = said or re.search(rf"\b{field.name}: ([\w<> ]+),", node.partition("fn default")[2])
        assert said, field.name
        text = said[1].replace("Duration::from_secs", "")
        if text == "MAX_FRAME_BYTES":
            found = re.search(r"MAX_FRAME_BYTES: usize = ([\d <]+);", wire)
            assert found
            text = found[1]
        assert eval(text) == field.default, field.name
        assert f"`{field.name}`" in table, f"SECURITY.md does not list {field.name}"


def test_a_limit_that_nobody_has_is_refused() -> None:
    with pytest.raises(TypeError):
        kx.Limits(frobs=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        kx.Limits().peers = 5  # type: ignore[misc]


def test_limits_hold_and_are_counted() -> None:
    with agent(limits=kx.Limits(handshake_timeout=0.2, connections=2)) as a:
        host, port = a.address.rsplit(":", 1)
        strangers = [socket.create_connection((host, int(port)), timeout=30) for _ in range(5)]
        for stranger in strangers:
            # What a stranger is told may be a refusal; what matters is that the agent closes.
            while stranger.recv(4096):
                pass
            stranger.close()
        stats = a.stats()
        while stats["limited_connections"] < 3 or stats["slow_connections"] < 2:
            stats = a.stats()
        assert stats["limited_connections"] == 3
        assert stats["bad_connections"] == 5
        assert (stats["auth_failures"], stats["limited"]) == (0, 0)
