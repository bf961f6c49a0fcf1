"""TLS between two processes, with certificates made by the commands in SECURITY.md."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
from two import Rank

import kvxfer as kx

ROOT = pathlib.Path(__file__).parents[2]
LAYOUT: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_dim": 16, "page_tokens": 4, "dtype": "float16"}
PAGES = 16


def issue(folder: pathlib.Path) -> pathlib.Path:
    """A folder with an authority and an agent's certificate."""
    text = (ROOT / "SECURITY.md").read_text()
    found = re.search(r"<!-- tls-commands -->\n```sh\n(.*?)```", text, re.DOTALL)
    assert found, "SECURITY.md has no commands any more"
    folder.mkdir()
    subprocess.run(["bash", "-euo", "pipefail", "-c", found[1]], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program is not installed")
    return issue(tmp_path_factory.mktemp("tls") / "ours")


def tls(folder: pathlib.Path, name: str | None = "kvxfer.internal") -> kx.Tls:
    return kx.Tls(cert=folder / "agent.pem", key=folder / "agent.key", ca=folder / "ca.pem", name=name)


def environment(folder: pathlib.Path) -> dict[str, str]:
    return {
        "KVXFER_TLS_CERT": str(folder / "agent.pem"),
        "KVXFER_TLS_KEY": str(folder / "agent.key"),
        "KVXFER_TLS_CA": str(folder / "ca.pem"),
        "KVXFER_TLS_NAME": "kvxfer.internal",
    }


def decode(given: kx.Tls | None, fabric: str = "shm", **more: Any) -> tuple[kx.Agent, kx.Pool]:
    layout = kx.PageLayout(**LAYOUT)
    pool = kx.alloc(layout, kx.Shard(), pages=PAGES)
    agent = kx.Agent(
        "decode", layout, kx.Shard(), memory=pool, role="decode", fabric=fabric, tls=given, **more
    )
    return agent, pool


@pytest.mark.parametrize("fabric", ["shm", "ucx"])
@pytest.mark.parametrize("secret", [None, "sesame"])
@pytest.mark.parametrize("name", [None, "kvxfer.internal"])
def test_a_hand_off_over_tls(certs: pathlib.Path, fabric: str, secret: str | None, name: str | None) -> None:
    env = environment(certs) | ({"KVXFER_SECRET": secret} if secret else {})
    agent, pool = decode(tls(certs, name), fabric, secret=secret)
    with Rank(LAYOUT, pages=PAGES, fabric=fabric, env=env) as peer, agent:
        for _ in range(3):
            room = kx.new_room()
            agent.expect(room, [3, 5], tokens=8, source=peer.address, timeout=60.0, bootstrap_timeout=60.0)
            peer.push(room, [1, 2], tokens=8)
            assert agent.wait(room, timeout=60.0).state == "Success"
            assert peer.end(room)[-1]["state"] == "Success"
        assert pool.k(0)[3].any()
        assert agent.stats()["auth_failures"] == peer.stats()["auth_failures"] == 0


def refused(agent: kx.Agent, peer: Rank, *words: str) -> None:
    room = kx.new_room()
    with agent:
        agent.expect(room, [3], tokens=4, source=peer.address, timeout=60.0, bootstrap_timeout=60.0)
        with pytest.raises(kx.AuthError) as caught:
            agent.wait(room, timeout=60.0)
    for word in words:
        assert word in str(caught.value)
    while not peer.stats()["auth_failures"]:
        pass


def test_whoever_is_not_let_in_is_told_why_and_never_waits(
    certs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    others = issue(tmp_path / "others")
    with Rank(LAYOUT, pages=PAGES, fabric="shm", env=environment(certs)) as peer:
        refused(decode(None)[0], peer, "tls differs", "the acceptor has TLS")
    with Rank(LAYOUT, pages=PAGES, fabric="shm") as peer:
        refused(decode(tls(certs))[0], peer, "tls differs", "the initiator has TLS")
    with Rank(LAYOUT, pages=PAGES, fabric="shm", env=environment(certs)) as peer:
        refused(decode(tls(others))[0], peer, "`ca`")
    with Rank(LAYOUT, pages=PAGES, fabric="shm", env=environment(certs)) as peer:
        refused(decode(tls(certs, "elsewhere.example"))[0], peer, "`name`", "elsewhere.example")


def test_tls_alone_is_enough_for_an_open_address(certs: pathlib.Path) -> None:
    assert "KVXFER_SECRET" not in os.environ
    agent, _ = decode(tls(certs), listen="0.0.0.0:0")
    agent.close()
