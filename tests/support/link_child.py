"""A network of two hosts that loses, delays, cuts and swallows packets, as a process of its own.

It makes two network namespaces, each with a TUN device, and carries the packets between them itself,
seeded: the kernel need have no netem. Orders are JSON lines on standard input, `{"delay_ms": 5, "loss":
0.05, "dead":
false,
"spare_ports": [...]}`; each is answered by one line with what was carried. The first line out tells where
the namespaces are, or why there are none.

Run as root, or as anyone who may make a user namespace and open /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Whole slices in one packet: this process is the slowest part of the link.
MTU = 60000
# Packets that may be on their way in one direction; more are dropped, as a router would.
QUEUE = 2000

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(what: int) -> None:
    if _libc.unshare(what):
        raise OSError(ctypes.get_errno(), f"unshare({what:#x})")


def enter_network() -> bool:
    """A namespace of our own to work in. Returns whether that took a user namespace too."""
    try:
        unshare(CLONE_NEWNET)
        return False
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return True


def device(address: str) -> int:
    """A TUN device in this namespace, up."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"kvx0", IFF_TUN | IFF_NO_PI))
    for words in (
        f"addr add {address}/24 dev kvx0",
        f"link set kvx0 up mtu {MTU} txqueuelen {QUEUE}",
        "link set lo up",
    ):
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True, env={"PATH": path})
    return tun


class Link:
    def __init__(self, tuns: list[int]) -> None:
        self.tuns = tuns
        self.random = random.Random(7)
        self.delay_s, self.loss, self.dead = 0.0, 0.0, False
        self.spare_ports: set[int] = set()
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.number = 0
        self.counts = {"carried": 0, "lost": 0, "swallowed": 0, "bytes": 0}

    def order(self, given: dict[str, Any]) -> dict[str, int]:
        self.delay_s = given.get("delay_ms", 0) / 1000
        self.loss = given.get("loss", 0.0)
        self.dead = given.get("dead", False)
        self.spare_ports = set(given.get("spare_ports", []))
        if self.dead:
            self.counts["swallowed"] += len(self.waiting)
            self.waiting.clear()
        return self.counts

    def take(self, side: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(self.tuns[side], MTU + 4)
            except BlockingIOError:
                return
            if self.dead:
                self.counts["swallowed"] += 1
            elif self.random.random() < self.loss or len(self.waiting) > QUEUE:
                self.counts["lost"] += 1
            elif self.delay_s and not self.is_spared(packet):
                self.number += 1
                due = time.monotonic() + self.delay_s
                heapq.heappush(self.waiting, (due, self.number, 1 - side, packet))
            else:
                self.give(1 - side, packet)

    def is_spared(self, packet: bytes) -> bool:
        """Whether it is TCP from or to a port that is not delayed."""
        if packet[0] >> 4 != 4 or packet[9] != 6:
            return False
        start = (packet[0] & 15) * 4
        return not self.spare_ports.isdisjoint(struct.unpack_from("!HH", packet, start))

    def give(self, side: int, packet: bytes) -> None:
        try:
            os.write(self.tuns[side], packet)
            self.counts["carried"] += 1
            self.counts["bytes"] += len(packet)
        except OSError:
            self.counts["lost"] += 1

    def due(self) -> float | None:
        """Delivers what is due, and says in how many seconds something is."""
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now:
            _, _, side, packet = heapq.heappop(self.waiting)
            self.give(side, packet)
        return max(0.0, self.waiting[0][0] - now) if self.waiting else None


def main() -> None:
    tuns, spaces, user = [], [], False
    try:
        for address in ADDRESSES:
            if spaces:
                unshare(CLONE_NEWNET)
            else:
                user = enter_network()
            tuns.append(device(address))
            spaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    except (OSError, subprocess.CalledProcessError) as error:
        print(json.dumps({"error": f"{error} {getattr(error, 'stderr', '') or ''}".strip()}), flush=True)
        return
    print(json.dumps({"spaces": [f"/proc/{os.getpid()}/fd/{fd}" for fd in spaces], "user": user}), flush=True)
    link = Link(tuns)
    with selectors.DefaultSelector() as selector:
        for side, tun in enumerate(tuns):
            selector.register(tun, selectors.EVENT_READ, side)
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select(link.due()):
                if key.data is not None:
                    link.take(key.data)
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                print(json.dumps(link.order(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
