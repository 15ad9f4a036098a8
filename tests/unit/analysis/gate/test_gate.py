"""A gate fails for a lost accept length and for what is worse than a baseline, and for nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner, Result

from eagle_trace.cli.main import app
from eagle_trace.errors import IncomparableError
from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis import diff
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.result import AcceptLength, Diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.gate import gated, worse_than
from eagle_trace_analysis.gate.compared import Compare
from eagle_trace_analysis.report.cases import cases_of_check, cases_of_diff
from eagle_trace_analysis.report.html import render_body
from eagle_trace_analysis.report.json import to_json
from eagle_trace_analysis.report.junit import to_junit
from eagle_trace_analysis.report.sarif import to_sarif
from eagle_trace_analysis.report.text import render
from tests.support.endings import ending_of
from tests.support.sarif import check_sarif
from tests.support.synthetic import Side, make_prompts, write_trace

GOLDEN = Path(__file__).parents[4] / "tests" / "golden"
TRAIN, HEALTHY, BROKEN = (str(GOLDEN / f"{name}.trace") for name in ("train", "healthy", "broken"))
PROMPTS = make_prompts(2)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """A synthetic trace; the same options give the same one."""
    folder = tmp_path_factory.mktemp("gate")
    made: dict[str, Trace] = {}

    def run(name: str, side: str = "serve", **options: Any) -> Trace:
        if name not in made:
            made[name] = write_trace(folder / f"{name}.trace", Side(side, **options), PROMPTS)
        return made[name]

    return run


def at(site: str, factor: float) -> Callable[..., Any]:
    return lambda where, _step, _rows, values: values * factor if where == site else values


@pytest.fixture(scope="module")
def healthy(write: Callable[..., Trace]) -> Diff:
    return diff(write("train", "train"), write("healthy"))


# ---- accept length


def accepted(result: Diff, observed: float | None, predicted: float | None, **more: Any) -> Diff:
    return replace(result, accept_length=AcceptLength(observed, rounds=10, predicted=predicted, **more))


@pytest.mark.parametrize(("observed", "status"), [(2.0, 0), (1.9, 0), (1.91, 0), (1.89, 1), (2.5, 0)])
def test_an_accept_length_may_be_lower_than_predicted_by_the_share_that_is_let_pass(
    healthy: Diff, observed: float, status: int
) -> None:
    result = gated(accepted(healthy, observed, 2.0), max_drop=0.05)
    assert result.exit_status == status, result.gate
    assert result.verdict == "agree"


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        (AcceptLength(None), "no verify rounds"),
        (AcceptLength(2.0, rounds=3), "nothing is predicted"),
        (AcceptLength(2.0, rounds=3, predicted=2.0, branches=4), "a tree"),
    ],
)
def test_an_accept_length_that_is_not_known_passes_no_gate(healthy: Diff, accept: AcceptLength, words: str) -> None:
    result = gated(replace(healthy, accept_length=accept), max_drop=0.5)
    assert result.exit_status == 2
    assert words in " ".join(ending_of(render(result)))


def test_of_two_servers_the_reference_says_what_is_lost(healthy: Diff) -> None:
    assert gated(accepted(healthy, 1.8, None, reference=2.0), max_drop=0.05).exit_status == 1
    assert gated(accepted(healthy, 1.96, None, reference=2.0), max_drop=0.05).exit_status == 0


# ---- a baseline


def test_a_trace_is_no_worse_than_itself_and_than_another_rounding(healthy: Diff, write: Callable[..., Trace]) -> None:
    assert worse_than(healthy, healthy) == []
    bf16 = [
        diff(write("train16", "train", dtype="bfloat16"), write(f"s{n}", dtype="bfloat16", noise_seed=n))
        for n in (1, 2)
    ]
    assert [one.verdict for one in bf16] == ["agree", "agree"]
    assert worse_than(*bf16) == worse_than(*bf16[::-1]) == []


def test_a_site_that_diverges_now_is_worse_and_what_follows_from_it_is_counted(
    healthy: Diff, write: Callable[..., Trace]
) -> None:
    now = diff(write("train", "train"), write("faulty", fault=at("embed", 1.1)))
    found = worse_than(now, healthy)
    assert {one.name for one in found} == {"diverges-now"}
    assert (found[0].site, found[0].step) == ("embed", 0)
    assert "behind it, too" in found[0].text
    assert len(found) < len([one for one in now.sites if one.verdict == "diverged"])
    assert gated(now, baseline=healthy).exit_status == 1


def test_what_diverged_in_the_baseline_already_fails_nothing(write: Callable[..., Trace]) -> None:
    known = diff(write("train", "train"), write("known", fault=at("layer.0.mlp.gate", 1.5)))
    assert known.verdict == "diverged"
    result = gated(known, baseline=known)
    assert result.exit_status == 0
    assert ending_of(render(result))[0].startswith("diverged: ")
    assert any(line.startswith("gate: passed: nothing worse") for line in ending_of(render(result)))


def test_a_new_divergence_behind_a_known_one_is_worse(write: Callable[..., Trace]) -> None:
    train = write("train", "train")

    def scaled(later: float) -> Callable[..., Any]:
        return lambda site, _step, _rows, values: values * {"norm": 1.5, "logits": later}.get(site, 1.0)

    before = diff(train, write("norm", fault=at("norm", 1.5)))
    sites = tuple(
        replace(one, divergence=None) if one.site == "logits" else one for one in before.sites
    )  # as if the logits had agreed
    now = diff(train, write("norm-and-logits", fault=scaled(2.0)))
    assert {one.site for one in worse_than(now, replace(before, sites=sites))} == {"logits"}


def test_an_error_that_grew_within_tolerance_by_more_than_its_floor_is_worse(healthy: Diff) -> None:
    def grown(floors: float) -> Diff:
        sites = []
        for one in healthy.sites:
            if (one.site, one.step) == ("layer.0.mlp.out", 0):
                assert isinstance(one.metrics, Metrics)
                assert one.tolerance is not None
                more = one.metrics.rho_median + floors * one.tolerance.allowed["rho_median"] / 4
                one = replace(one, metrics=replace(one.metrics, rho_median=more))
            sites.append(one)
        return replace(healthy, sites=tuple(sites))

    assert worse_than(grown(0.9), healthy) == []
    (failure,) = worse_than(grown(1.1), healthy)
    assert (failure.name, failure.site, failure.step) == ("error-grew", "layer.0.mlp.out", 0)


def test_a_site_that_is_not_compared_any_more_is_worse(healthy: Diff, write: Callable[..., Trace]) -> None:
    now = diff(write("train", "train"), write("without", without=("layer.0.mlp.norm",)))
    assert "layer.0.mlp.norm" in {one.site for one in worse_than(now, healthy)}
    shapes = diff(write("train", "train"), write("shapes", level="shapes"))
    assert {one.name for one in worse_than(shapes, healthy)} == {"no-longer-compared"}


def test_a_baseline_that_cannot_be_compared_is_refused_in_a_sentence(healthy: Diff) -> None:
    with pytest.raises(IncomparableError, match=r"the baseline .* cannot be compared: no row"):
        gated(healthy, baseline=replace(healthy, incomparable="no row in common"))


# ---- the factor


def test_the_factor_scales_what_is_allowed_and_nothing_else(write: Callable[..., Trace]) -> None:
    pair = write("train", "train"), write("healthy")
    for factor in (1.0, 8.0):
        for four, other in zip(diff(*pair).sites, diff(*pair, tolerance=factor).sites, strict=True):
            if four.tolerance is not None and other.tolerance is not None:
                assert four.metrics == other.metrics
                for name, allowed in four.tolerance.allowed.items():
                    assert other.tolerance.allowed[name] == pytest.approx(allowed * factor / 4)


# ---- the command, and what a build reads


@pytest.fixture(scope="module")
def golden() -> dict[str, Diff]:
    """Comparisons of the golden traces, each with a gate."""
    train, healthy, broken = (open_trace(path) for path in (TRAIN, HEALTHY, BROKEN))
    well, ill = diff(train, healthy), diagnosed(diff(train, broken), train, broken)
    return {
        "healthy": gated(well, max_drop=0.05, baseline=well),
        "plain": ill,
        "lost": gated(ill, max_drop=0.05),
        "worse": gated(ill, max_drop=0.05, baseline=well),
        "known": gated(ill, baseline=ill),
        "incomparable": gated(replace(well, incomparable="no row in common"), max_drop=0.05),
    }


@pytest.mark.parametrize(
    ("name", "status"), [("healthy", 0), ("plain", 1), ("lost", 1), ("worse", 1), ("known", 0), ("incomparable", 2)]
)
def test_the_exit_status_is_the_gates_and_builds_can_read_why(name: str, status: int, golden: dict[str, Diff]) -> None:
    result = golden[name]
    assert result.exit_status == status
    suite = cases_of_diff(result)
    bad = check_junit(to_junit(suite))
    assert (bad > 0) == (status > 0)
    log = json.loads(to_sarif(suite, exit_status=status))
    check_sarif(log)
    assert sum(one["level"] == "error" for one in log["runs"][0]["results"]) == bad
    assert len(ending_of(render(result, next_command="eagle-trace diff a b"))) <= 12
    assert max(map(len, render(result, verbose=False).splitlines())) <= 80


def test_a_check_is_read_by_builds_too_whatever_its_folder_is_called(tmp_path: Path) -> None:
    result = check(_one_layer(tmp_path / "a&b<\u202e\x01> c"))
    assert result.exit_status == 1
    suite = cases_of_check(result)
    assert check_junit(to_junit(suite)) == result.count(Status.FAIL)
    log = json.loads(to_sarif(suite, exit_status=1))
    check_sarif(log)
    assert "use_aux_hidden_state to true" in log["runs"][0]["results"][0]["message"]["text"]


def test_the_html_report_holds_every_failure_of_the_gate(golden: dict[str, Diff]) -> None:
    page = unescape(render_body(golden["worse"]))
    assert golden["worse"].gate is not None
    assert all(one.text in page for one in golden["worse"].gate.failures)
    assert "The gate passes." in render_body(golden["healthy"])
    assert "The gate" not in render_body(golden["plain"])


def test_json_says_what_the_gate_said(golden: dict[str, Diff]) -> None:
    data = to_json(golden["worse"])
    assert (data["exit_status"], data["gate"]["passed"]) == (1, False)
    assert [one["name"] for one in data["gate"]["failures"]] == ["accept-length", "diverges-now"]
    assert to_json(golden["plain"])["gate"] is None


def test_the_commands_write_all_formats(tmp_path: Path) -> None:
    def run(*words: str) -> Result:
        return CliRunner().invoke(app, list(words))

    done = run("diff", TRAIN, BROKEN, "--format", "junit", "--max-drop", "0.05", "--baseline", HEALTHY)
    assert done.exit_code == 1, done.output
    assert check_junit(done.stdout) == 3  # the accept length, the site, the cause
    out = tmp_path / "report.sarif"
    done = run("diff", TRAIN, BROKEN, "--no-diagnose", "--format", "sarif", "--out", str(out), "--baseline", BROKEN)
    assert done.exit_code == 0, done.output
    assert ending_of(done.stdout)[0].startswith("diverged: ")
    check_sarif(json.loads(out.read_text()))
    folder = str(_one_layer(tmp_path / "draft"))
    check_sarif(json.loads(run("check", folder, "--format", "sarif").stdout))
    assert check_junit(run("check", folder, "--format", "junit").stdout) == 1
    brief = run("check", folder, "--quiet").stdout
    assert "pass" not in brief.replace("passed", "")
    for words in (
        ["--tolerance", "0.5"], ["--tolerance", "inf"], ["--baseline", str(GOLDEN / "none.trace")], ["--max-drop", "2"],
    ):  # fmt: skip
        done = run("diff", TRAIN, HEALTHY, *words)
        assert (done.exit_code, "Traceback" in done.output) == (2, False)


#: of the schema that Jenkins' xUnit plugin holds reports against (junit-10): elements that are written, with attributes
#: that they may have, those that they must have, and the elements that they may hold
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, set(), {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "time", "skipped", "timestamp"},
        {"name", "tests", "failures", "errors"},
        {"testcase", "system-out"},
    ),
    "testcase": ({"name", "time", "classname"}, {"name"}, {"skipped", "error", "failure", "system-out"}),
    "failure": ({"type", "message"}, set(), set()),
    "error": ({"type", "message"}, set(), set()),
    "skipped": ({"type", "message"}, set(), set()),
    "system-out": (set(), set(), set()),
}


def check_junit(text: str) -> int:
    """Assert that readers of JUnit XML find what they look for; how many failures and errors there are."""
    root = ET.fromstring(text)
    for element in root.iter():
        allowed, required, children = SCHEMA[element.tag]
        assert required <= set(element.attrib) <= allowed, element.tag
        assert {child.tag for child in element} <= children, element.tag
    (suite,) = root
    cases = suite.findall("testcase")
    assert (root.tag, suite.tag, int(suite.attrib["tests"])) == ("testsuites", "testsuite", len(cases))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        count = len(suite.findall(f"testcase/{tag}"))
        assert int(suite.attrib[attribute]) == int(root.attrib.get(attribute, count)) == count
    assert all(case.get("name") and case.get("classname") and len(case) <= 1 for case in cases)
    assert len({case.get("name") for case in cases}) == len(cases), "readers take one name for one case"
    return len(suite.findall("testcase/failure")) + len(suite.findall("testcase/error"))


def _one_layer(folder: Path) -> Path:
    """A draft with one failing check."""
    from tests.support import checkpoints as make
    from tests.support.tensor_cases import flat, tensors

    config = flat()
    config["eagle_config"] = {**config["eagle_config"], "use_aux_hidden_state": False}
    make.write_checkpoint(folder, config, tensors())
    return folder


def test_a_golden_trace_opens_as_a_baseline_in_a_sketch(write: Callable[..., Trace], healthy: Diff) -> None:
    golden = diff(write("train", "train"), write("sketched", level="sketch"))
    assert golden.level == "sketch"
    assert worse_than(healthy, golden) == []
    assert open_trace(HEALTHY).side == "serve"


def test_a_baseline_of_another_kind_is_refused_in_a_sentence(write: Callable[..., Trace]) -> None:
    train, served = write("train", "train"), write("healthy")
    with pytest.raises(IncomparableError, match=r"is a train trace of .*: give a baseline recorded on"):
        Compare(diagnose=False)(train, served, baseline=train)
    assert Compare(diagnose=False)(train, served, baseline=served).exit_status == 0
