"""The dashboard, the alerts and docs/operate.md name metrics that exist, and each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer._families import FAMILIES
from kvxfer.admission import Admission, Decode, Prefill
from kvxfer.prometheus import metric_names
from kvxfer.proxy.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "monitoring"
RULES = MONITORING / "kvxfer-alerts.yml"
TESTS = MONITORING / "kvxfer-alerts.test.yml"
DASHBOARD = MONITORING / "kvxfer-dashboard.json"
OPERATE = ROOT / "docs" / "operate.md"

METRIC = re.compile(r"\bkvxfer_[a-z_]+\b")
SELECTOR = re.compile(r"\b(kvxfer_[a-z_]+)\{([^}]*)\}")
# What a scrape, a histogram, or a rule that sums adds to a metric's own labels.
COMMON = {"job", "instance", "agent", "le"}


def proxys() -> dict[str, set[str]]:
    """The names that a proxy's `/metrics` has, each with its labels."""
    admission = Admission()
    admission.add_prefill(Prefill("p"))
    admission.add_decode(Decode("d", pages=100))
    metrics = Metrics(admission.stats, lambda: 0.0)
    metrics.part.labels("prefill")
    metrics.refused.labels("link")
    metrics.first_token.observe(1.0)
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {name: labels for name, labels in found.items() if name.startswith("kvxfer_")}


PROXYS = proxys()


def promtool(*arguments: str) -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool; `apt-get install prometheus` has it")
    done = subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=MONITORING
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


def recorded() -> set[str]:
    return set(re.findall(r"- record: (\S+)", RULES.read_text()))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def unknown(text: str) -> list[str]:
    return sorted({name for name in METRIC.findall(text) if name not in {*metric_names(), *PROXYS}})


def wrong_labels(text: str) -> list[str]:
    """Selectors on labels, or label values, that a metric does not have."""
    labels = {name: own | COMMON for name, own in PROXYS.items()}
    labels |= {name: set(f.labels) | COMMON for f in FAMILIES for name in f.exposed}
    wrong = []
    for name, inside in SELECTOR.findall(text):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside):
            if name in labels and label not in labels[name]:
                wrong.append(f"{name}{{{label}}}")
    return wrong


def test_promtool_checks_the_rules() -> None:
    assert f"{len(alerts()) + len(recorded())} rules found" in promtool("check", "rules", str(RULES))


def test_promtool_runs_the_rules_tests() -> None:
    promtool("test", "rules", str(TESTS))


def test_every_alert_has_a_test_that_sees_it_fire() -> None:
    text = TESTS.read_text()
    assert len(alerts()) >= 8
    for alert in alerts():
        assert alert in text, alert


def test_every_metric_that_the_rules_name_exists() -> None:
    text = RULES.read_text()
    assert unknown(text) == []
    assert wrong_labels(text) == []
    assert set(re.findall(r"\bkvxfer:[\w:]+", text)) == recorded()


def test_every_metric_that_the_rules_tests_feed_exists() -> None:
    assert unknown(TESTS.read_text()) == []
    assert wrong_labels(TESTS.read_text()) == []


def test_every_metric_that_the_dashboard_names_exists() -> None:
    assert len(expressions()) >= 20
    for expr in expressions():
        assert unknown(expr) == [], expr
        assert wrong_labels(expr) == [], expr
    variables = [v for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    for variable in variables:
        assert unknown(variable["definition"]) == []
    # Counters are shown as rates, and nothing else is.
    counters = {name for f in FAMILIES for name in f.exposed if f.kind in ("counter", "histogram")}
    counters |= {name for name in PROXYS if name.endswith(("_total", "_bucket"))}
    for expr in expressions():
        for name in METRIC.findall(expr):
            inside = re.search(rf"rate\({name}\{{", expr) is not None
            assert inside == (name in counters), expr


def test_what_agents_cannot_know_the_proxy_exposes_under_the_same_names() -> None:
    """Slots and requests that wait for memory need no line of code in an engine behind `kvxfer proxy`."""
    of_load = {f.exposed[0]: set(f.labels) for f in FAMILIES if f.name.startswith("kvxfer_slots")}
    of_load["kvxfer_requests_waiting"] = {"cause"}
    for name, labels in of_load.items():
        assert PROXYS[name] == {"agent", *labels}
        assert any(name in expr for expr in expressions())
        assert name in RULES.read_text()


def test_the_dashboard_is_what_its_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_dashboard.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_dashboard_is_well_formed() -> None:
    panels = dashboard()["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]


def test_a_metric_or_label_that_does_not_exist_is_found() -> None:
    assert unknown("rate(kvxfer_moved_bytes[1m]) + kvxfer_nothing") == [
        "kvxfer_moved_bytes",
        "kvxfer_nothing",
    ]
    assert wrong_labels('kvxfer_pages{colour="red", state="granted"}') == ["kvxfer_pages{colour}"]


def test_operate_explains_every_alert_and_every_metric() -> None:
    text = OPERATE.read_text()
    for alert in alerts():
        assert f"`{alert}`" in text, alert
    for family in FAMILIES:
        name = family.exposed[0] if family.kind != "histogram" else family.name
        assert f"`{name}`" in text, name


def test_operate_names_only_what_exists() -> None:
    text = OPERATE.read_text()
    names = {*metric_names(), *PROXYS} | {f.name for f in FAMILIES if f.kind == "histogram"}
    assert [name for name in set(METRIC.findall(text)) if name not in names] == []
    assert [a for a in set(re.findall(r"`(Kvxfer[A-Z]\w+)`", text)) if a not in alerts()] == []
    assert set(re.findall(r"\bkvxfer:[\w:]+", text)) <= recorded()
    for file in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (OPERATE.parent / file).exists(), file
