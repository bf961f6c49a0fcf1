"""Agents that listen on IPv6 addresses."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from two import Prefill, eventually

import kvxfer as kx

LAYOUT: dict[str, Any] = {
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "page_tokens": 16,
    "dtype": "float16",
    "order": "HND",
}


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("listen", ["[::1]:0", "bare"])
@pytest.mark.parametrize("fabric", ["shm", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_case_20_a_hand_off_between_ipv6_addresses(fabric: Any, listen: str) -> None:
    """With brackets and a port, and as a bare address, which has the default port."""
    if listen == "bare":
        with socket.socket(socket.AF_INET6) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("::1", 8998))
            except OSError:
                pytest.skip("port 8998 of ::1 is taken")
        listen = "::1"
    layout = kx.PageLayout(**LAYOUT)
    with Prefill(LAYOUT, pages=8, alloc=fabric, fabric=fabric, listen=listen) as prefill:
        host, _, port = prefill.address.rpartition(":")
        assert host == "[::1]"
        assert (listen != "::1") or port == "8998"
        memory = kx.alloc(layout, kx.Shard(), pages=8, fabric=fabric)
        with kx.Agent("decode", layout, kx.Shard(), memory=memory, listen="[::1]:0", fabric=fabric) as decode:
            assert decode.address.startswith("[::1]:")
            for source in {prefill.address, prefill.address if listen != "::1" else "::1"}:
                room = kx.new_room()
                decode.expect(room, [1, 3], tokens=32, source=source)
                prefill.push(room, [2, 4], tokens=32)
                assert decode.wait(room, timeout=20).state == "Success"
                assert prefill.end(room)[-1]["released"]
            reference = prefill.reference()
            for key, tensor in memory.tensors.items():
                got, want = np.asarray(tensor)[[1, 3]], np.asarray(reference[key])[[2, 4]]
                assert np.array_equal(got.view(np.uint16), want.view(np.uint16)), key
            eventually(lambda: decode.stats()["connections"] == 1, "one session")
