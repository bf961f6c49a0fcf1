"""docs/proxy.md names every option, setting and metric of the proxy, with its default."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from kvxfer.admission import Admission, Reason
from kvxfer.proxy.metrics import Metrics

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "proxy.md").read_text()


def test_every_option_is_there_with_its_default() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "proxy", "--help"],
        capture_output=True,
        text=True,
        env={"COLUMNS": "200"},
        check=True,
    )
    options = re.findall(r"^  (--[a-z-]+)(.*?)(?=^  --|\Z)", done.stdout.split("options:")[1], re.M | re.S)
    assert len(options) > 15
    rows = {
        match[1]: match[2].strip(" `")
        for match in re.finditer(r"^\| `(--[a-z-]+)[^|]*\| ([^|]*)\|", TEXT, re.M)
    }
    for name, wrapped in options:
        help_text = re.sub(r"-\n\s+", "-", wrapped)
        if name in ("--prefill", "--decode"):
            assert f"`{name}` " in TEXT
            settings = set(re.findall(r"([a-z-]+)=(?:N|HOST:PORT|NAME)\b", help_text))
            assert len(settings) >= 4
            assert [one for one in settings if f"`{one}=" not in TEXT] == []
            continue
        assert name in rows, name
        default = re.search(r"\(default:\s+([^\s):]+(?::\d+)?)", help_text)
        assert rows[name] == (default[1] if default else ""), name


def test_every_metric_is_there() -> None:
    admission = Admission()
    registry: CollectorRegistry = Metrics(admission.stats, lambda: 0.0).registry
    names = {one.name.removeprefix("kvxfer_proxy_") for one in registry.collect() if "kvxfer" in one.name}
    assert len(names) > 20
    assert [name for name in names if not re.search(rf"`{name}(?:_total)?[`{{]", TEXT)] == []


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_there(reason: Reason) -> None:
    assert f"`{reason}`" in TEXT
