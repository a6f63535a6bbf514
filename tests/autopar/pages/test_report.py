"""The report: one page without a network, with marks for every action, readable without charts."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autopar.api
from autopar.pages.report import BEGINNING, WORDS, report
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.errors import ExitCode
from autopar.planner.plan.files.document import write_plan
from autopar.planner.plan.plan import Plan, PlannedCount
from autopar.planner.plan.telling.timeline import timeline_of
from autopar.planner.plan.telling.words import arrangement_words
from autopar.runs.run_metrics import AnalyzedRun, analyze
from tests.autopar.commands import Autopar
from tests.planner.plan.plans import arrangement, small_plan

pytest.importorskip("vl_convert", reason="charts need the extra `report`")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
CHROMIUM = shutil.which("chromium")
FIGURES = 9


@cache
def plan() -> Plan:
    usual = small_plan(
        pipeline=2, arrangement=arrangement(pipeline=2, data=1, shard=1, microbatches=6)
    )
    return replace(usual, model=replace(usual.model, name=HOSTILE))


@cache
def page(*, has_run: bool = False) -> str:
    if not has_run:
        return report(plan())
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 3 / step, "seconds": 0.011, "per_second": 700.0}
        for step in range(1, 9)
    ]
    lines.insert(4, {"event": "evaluated", "step": 4, "loss": 0.9, "metrics": {}})
    analysis = analyze(plan(), lines)
    assert analysis is not None
    return report(plan(), AnalyzedRun(lines=lines, analysis=analysis))


class Reader(HTMLParser):
    """Notes the tags, the links and the labels of marks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        self.labels += [value or "" for key, value in attrs if key == "aria-label"]


def test_the_page_loads_nothing_and_a_hostile_name_stays_text() -> None:
    found = Reader(page())
    assert page().startswith(BEGINNING)
    assert not found.links
    assert found.tags.count("script") == 1
    assert "img" not in found.tags
    assert len(page()) < 2 * 2**20


def test_numbers_of_devices_that_were_planned_are_a_curve() -> None:
    others = {
        devices: arrangement(data=devices, shard=1, microbatches=6 // devices) for devices in (1, 3)
    }
    counts = tuple(
        PlannedCount(
            arrangement=one,
            step_seconds=0.8 / one.ranks**0.9,
            device_bytes=10**9,
            usd_per_hour=2.5 * one.ranks,
        )
        for one in (others[1], plan().arrangement, others[3])
    )
    text = report(replace(plan(), curve=counts))
    assert "Numbers of devices" not in page()
    labels = Reader(text).labels
    assert {label for label in labels if label.endswith("a step")} == {
        f"on {one.arrangement.ranks}: {arrangement_words(one.arrangement)}: "
        f"{seconds_text(one.step_seconds)} a step"
        for one in counts
    }
    assert "<td>2 (chosen)</td>" in text
    for devices, efficiency in ((1, 1.0), (2, 2**0.9 / 2), (3, 3**0.9 / 3)):
        assert f"{efficiency:.0%}" in text, devices


def test_every_action_of_the_schedule_is_a_mark_in_both_widths() -> None:
    wanted = {
        f"rank {one.rank}, stage {one.stage}, microbatch {one.microbatch}: "
        for one in timeline_of(plan()).actions
    }
    labels = Reader(page()).labels
    for words in wanted:  # a forward and a backward, on a screen and on a phone
        assert sum(label.startswith(words) for label in labels) == 4


def test_each_figure_has_words_and_numbers_beside_its_chart() -> None:
    sections = page().split("<section")[1:]
    assert len(sections) == FIGURES
    for section in sections:
        assert re.search(r'<p class="soft">\S', section)
        if "<svg" in section:
            assert "<table" in section
            assert 'role="img" aria-label="' in section


def test_a_run_is_shown_beside_the_prediction() -> None:
    text = page(has_run=True)
    assert text.count("<section") == FIGURES + 3
    labels = Reader(text).labels
    assert "step 4: evaluation 0.9" in labels
    assert "step 8: training 0.375" in labels
    assert any(label.startswith("step: 11 ms measured") for label in labels)


PRESS = """
<script>
const chart = document.querySelector(`.chart.wide[aria-label^="Schedule"]`);
for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"])
  chart.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
document.title = chart.parentElement.querySelector("figcaption").textContent;
</script>
"""


def test_a_long_run_shows_every_evaluation_and_its_last_step() -> None:
    steps = range(1, 5001)
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 3 / step, "seconds": 0.011, "per_second": 700.0} for step in steps
    ]
    for step in (1001, 2002, 3003):
        lines.append({"event": "evaluated", "step": step, "loss": 0.9, "metrics": {}})
    analysis = analyze(plan(), lines)
    assert analysis is not None
    text = report(plan(), AnalyzedRun(lines=lines, analysis=analysis))
    assert len(set(re.findall(r"step \d+: evaluation", text))) == 3
    assert "step 5000: training" in text
    assert len(set(re.findall(r"step \d+: training", text))) <= 1000


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("has_run", [pytest.param(False, marks=pytest.mark.more_cells), True])
def test_a_browser_shows_it_without_errors_and_keys_go_through_the_marks(
    has_run: bool, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text(page(has_run=has_run) + PRESS)
    shown = _opened(tmp_path / "report.html", tmp_path / "profile")
    assert "CONSOLE" not in shown.stderr
    title = re.search(r"<title>(.*?)</title>", shown.stdout)
    assert title is not None
    assert title[1].startswith("rank 0, stage 0, microbatch 0: forward")


def _opened(path: Path, profile: Path) -> "subprocess.CompletedProcess[str]":
    quiet: Sequence[str] = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
    )  # fmt: skip
    assert CHROMIUM is not None
    return subprocess.run(
        [CHROMIUM, *quiet, "--enable-logging=stderr", f"--user-data-dir={profile}", "--dump-dom",
         path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def test_the_command_writes_a_file_and_replaces_no_other(autopar: Autopar, tmp_path: Path) -> None:
    write_plan(small_plan(pipeline=2), tmp_path / "plan.json")
    target = tmp_path / "shown" / "report.html"
    for _ in range(2):  # its own file may be replaced
        assert autopar("report", str(tmp_path / "plan.json"), "-o", str(target)).code == 0
    assert target.read_text().startswith(BEGINNING)
    (other := tmp_path / "mine.html").write_text("<html>mine</html>")
    refused = autopar("report", str(tmp_path / "plan.json"), "-o", str(other))
    assert refused.code == ExitCode.USAGE
    assert other.read_text() == "<html>mine</html>"


def test_a_plan_shows_itself_in_a_notebook() -> None:
    shown = autopar.api.Plan(content=plan(), folder=Path())._repr_html_()
    assert shown is not None
    frame = Reader(shown)
    assert frame.tags == ["iframe"]  # the page is escaped inside it


def test_the_words_are_explained_on_the_page_of_the_planner_in_the_same_way() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "planner.md").read_text(encoding="utf-8")
    table = "\n".join(f"| {name} | {meaning} |" for name, meaning in WORDS.items())
    assert f"| name | meaning |\n|---|---|\n{table}\n\n" in documented
