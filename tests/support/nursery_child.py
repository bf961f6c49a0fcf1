"""The other end of `nursery.Nursery`: forks a rank for each message on its standard input, a socket."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import traceback

import rank_child


def be_a_rank(env: dict[str, str], stdin: int, stdout: int) -> None:
    code = 1
    try:
        os.environ.update(env)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        # Standard input was opened on the socket, and so was the copy of standard output made before this.
        sys.stdin = os.fdopen(0, closefd=False)
        rank_child.OUT = os.fdopen(os.dup(stdout), "w")
        os.closerange(3, rank_child.OUT.fileno())
        os.closerange(rank_child.OUT.fileno() + 1, 256)
        rank_child.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # As at an interpreter's end.
        atexit._run_exitfuncs()
        rank_child.OUT.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    with socket.socket(fileno=os.dup(0)) as sock:
        while True:
            text, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2)
            if not text:
                return
            read, write = os.pipe()
            between = os.fork()
            if between == 0:
                pid = os.fork()
                if pid == 0:
                    be_a_rank(json.loads(text), *fds)
                os.write(write, str(pid).encode())
                os._exit(0)
            os.waitpid(between, 0)
            pid_text = os.read(read, 100)
            for fd in (read, write, *fds):
                os.close(fd)
            # Only now: the child has been adopted.
            sock.sendall(pid_text)


if __name__ == "__main__":
    main()
