"""`kvxfer proxy`: an HTTP router for pairs of prefill and decode servers with the OpenAI API.

It needs the extra `proxy` (`pip install 'kvxfer[proxy]'`). docs/proxy.md is for its users.
"""

from __future__ import annotations

from kvxfer.proxy.router import Router
from kvxfer.proxy.serve import serve
from kvxfer.proxy.settings import DecodeServer, PrefillServer, Settings, parse_decode, parse_prefill

__all__ = ["DecodeServer", "PrefillServer", "Router", "Settings", "parse_decode", "parse_prefill", "serve"]
