"""Any two traces: a server against a server, a trainer against a trainer, and either order of the usual pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace import Trace
from eagle_trace.cli.main import app
from eagle_trace.errors import IncomparableError
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.pairing.roles import Roles
from eagle_trace_analysis.report.html import render_html
from eagle_trace_analysis.report.json import to_json
from eagle_trace_analysis.report.text import render
from tests.support import planted_faults as plant
from tests.support.endings import ending_of
from tests.support.planted import Planted, serving
from tests.support.synthetic import Side, make_prompts, only, write_trace

pytestmark = pytest.mark.slow

CHAINS = make_prompts()
SIDES = [("serve", "serve"), ("train", "train")]
#: one cause of each way of being proved: by a step recomputed, by the map, by what was loaded
BETWEEN_SERVERS = ("norm-eps", "d2t-missing", "weights-dropped")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Trace]:
    def make(side: str, prompts: Any = CHAINS, *, floors: Any = (), **options: Any) -> Trace:
        path = tmp_path / f"{side}{len(list(tmp_path.iterdir()))}.trace"
        return write_trace(path, Side(side, **options), prompts, floors=floors)

    return make


def notes(result: Diff) -> dict[str, str]:
    return {note.name: note.text for note in result.notes}


@pytest.mark.parametrize("sides", SIDES)
def test_two_healthy_traces_of_one_side_agree(sides: tuple[str, str], write: Any) -> None:
    result = diff(write(sides[0], noise_seed=1), write(sides[1], noise_seed=2))
    assert result.verdict == "agree", (result.first_divergence, result.incomparable)
    assert result.coverage.matched == result.coverage.serve_rows


@pytest.mark.parametrize("sides", SIDES)
def test_a_fault_between_two_traces_of_one_side_is_named_at_its_site(sides: tuple[str, str], write: Any) -> None:
    fault = only("embed", 0, lambda _, values: values * 1.1)
    result = diff(write(sides[0]), write(sides[1], fault=fault))
    assert result.first_divergence is not None
    assert (result.first_divergence.site, result.first_divergence.step) == ("embed", 0)
    assert "B is 1.1 x A" in result.first_divergence.why
    text = render(result)
    assert ending_of(text)[0] == "diverged: A and B first part at embed, step 0 (values)"
    assert "serv" not in text.partition("traces\n")[0].replace("serve0.trace", "").replace("no train trace", "")
    assert f"Ais{result.traces['train']['path']}" in "".join(text.split()), "a long path is broken anywhere"


def test_a_train_trace_is_the_reference_wherever_it_stands(write: Any) -> None:
    train, serve = write("train"), write("serve", fault=only("embed", 0, lambda _, values: values * 1.1))
    one, two = (diagnosed(diff(*pair), *pair) for pair in ((train, serve), (serve, train)))
    assert to_json(one) == to_json(two)
    assert render(one) == render(two)
    assert to_json(one)["reference"] == {
        "called": "train", "name": "training", "side": "train", "host": "synthetic", "path": str(train.path)
    }  # fmt: skip


def test_where_answers_part_is_said_and_what_follows_is_not_compared(write: Any) -> None:
    prompt = CHAINS[0]
    at = prompt.length + 1
    other = replace(prompt, tokens=(*prompt.tokens[:at], prompt.tokens[at] + 1, *prompt.tokens[at + 1 :]))
    healthy = diff(write("serve"), write("serve", [other, *CHAINS[1:]]))
    assert healthy.verdict == "agree", (healthy.first_divergence, healthy.incomparable)
    expected = (
        f"1 of {len(CHAINS)} answers part: prompt {prompt.key!r} at token {at}, after 1 equal tokens of the answer"
    )
    assert notes(healthy)["answers-part"].startswith(expected)
    assert f"({prompt.tokens[at]} in A, {prompt.tokens[at] + 1} in B)" in notes(healthy)["answers-part"]
    assert healthy.coverage.skipped_serve["answers-part"] > 0
    fault = only("fc.out", 0, lambda _, values: values * 1.1)
    result = diff(write("serve"), write("serve", [other, *CHAINS[1:]], fault=fault))
    assert result.first_divergence is not None
    assert result.first_divergence.site == "fc.out"


def test_draft_rows_below_other_roots_are_skipped_on_both_sides(write: Any) -> None:
    fewer = [replace(prompt, chains=prompt.chains[:1]) for prompt in CHAINS]
    for pair in ((write("serve"), write("serve", fewer)), (write("serve", fewer), write("serve"))):
        result = diff(*pair)
        assert result.verdict == "agree", (result.first_divergence, result.incomparable)
        skipped = result.coverage.skipped_serve | result.coverage.skipped_train
        assert skipped.get("not-drafted", 0) > 0
        assert result.coverage.unmatched_serve == 0


def floor(site: str) -> dict[str, Any]:
    figures = ("rho_median", "rho_p99", "rho_max", "channel_median", "channel_p99", "channel_max")
    facts = {"site": site, "step": 0, "dtype": "float32", "reference": "float64", "rows": 9}
    return facts | dict.fromkeys(figures, 0.25)


def test_a_train_trace_lends_its_floors_to_two_servers(write: Any) -> None:
    fault = only("embed", 0, lambda _, values: values * 1.1)
    one, two = write("serve"), write("serve", fault=fault)
    lender = write("train", floors=[floor("embed")])
    result = diff(one, two, floors=lender)
    assert str(lender.path) in result.tolerance
    (embed,) = [result for result in result.sites if (result.site, result.step) == ("embed", 0)]
    assert embed.verdict == "agree"
    assert "no train trace lends" in diff(one, two).tolerance


def test_floors_that_are_none_or_not_needed_are_refused(write: Any) -> None:
    one, two = write("serve"), write("serve")
    with pytest.raises(IncomparableError, match="no rounding floors to lend"):
        diff(one, two, floors=write("train"))
    lender = write("train", floors=[floor("embed")])
    with pytest.raises(IncomparableError, match="floors of its own: leave --floors out"):
        diff(lender, two, floors=lender)


def test_the_command_takes_two_servers_in_every_format(write: Any, tmp_path: Path) -> None:
    one, two = write("serve"), write("serve", fault=only("embed", 0, lambda _, values: values * 1.1))
    done = CliRunner().invoke(app, ["diff", str(one.path), str(two.path), "--format", "json"])
    assert done.exit_code == 1, done.output
    data = json.loads(done.stdout)
    assert data["format_version"] == 2
    assert [data[role]["name"] for role in ("reference", "other")] == ["A", "B"]
    assert [data[role]["side"] for role in ("reference", "other")] == ["serve", "serve"]


def test_the_page_of_two_servers_speaks_of_them_alone(write: Any) -> None:
    one, two = write("serve"), write("serve", fault=only("embed", 0, lambda _, values: values * 1.1))
    page = render_html(diagnosed(diff(one, two), one, two), train=one, serve=two)
    body = page[page.index("<body") :]
    assert "A and B part at <code>embed</code>" in body
    assert '<th class="train">A</th><th class="serve">B</th>' in body
    for words in ("in training", "in serving", "in train", "in serve", "training would", "Training and serving"):
        assert words not in body


@pytest.mark.parametrize("name", [r"host\1", r"\g<0>", "<B>", "<img src=x onerror=y>", "train 1", "serving", "a & b"])
def test_a_name_from_a_manifest_is_put_where_it_belongs_as_it_is(name: str) -> None:
    roles = Roles(name, "other", ("serve", "serve"))
    said = roles.say("Training and serving differ, in training and in serving")
    assert said == f"{name} and other differ, in {name} and in other"
    assert unescape(roles.say_html("<p>in training, in serving</p>")) == f"<p>in {name}, in other</p>"
    assert roles.say_html("<p>in training</p>").count("<") == 2


def facts(side: str, host: str, version: str) -> dict[str, Any]:
    return {"side": side, "host": host, "packages": {host: version}}


@pytest.mark.parametrize(
    ("one", "two", "names"),
    [
        (("train", "speculators", "0.9.0"), ("serve", "sglang", "0.5.23"), ("training", "serving")),
        (("serve", "sglang", "0.5.23"), ("serve", "vllm", "0.12"), ("sglang", "vllm")),
        (("serve", "sglang", "0.5.22"), ("serve", "sglang", "0.5.23"), ("sglang 0.5.22", "sglang 0.5.23")),
        (("serve", "sglang", "0.5.23"), ("serve", "sglang", "0.5.23"), ("A", "B")),
        (("train", "speculators", "0.9.0"), ("train", "specforge", "1.0"), ("speculators", "specforge")),
    ],
)
def test_names_are_as_short_as_tells_the_two_apart(one: Any, two: Any, names: tuple[str, str]) -> None:
    roles = Roles.of({"train": facts(*one), "serve": facts(*two)})
    assert (roles.reference, roles.other) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fused features are [T, 1] in serving, [T, 3] in training", "fused features are [T, 1] in B, [T, 3] in A"),
        ("layer 0 of the server is training's 1", "layer 0 of B is A's 1"),
        ("set eps to 1e-6, as trained, in the deployed config", "set eps to 1e-6, as in A, in B's config"),
        ("(norm 2, trained 1)", "(norm 2, A 1)"),
        ("carry in train, target.hidden.0 (serve)", "carry in A, target.hidden.0 (B)"),
        ("serve with --speculative-algorithm EAGLE3", "serve with --speculative-algorithm EAGLE3"),
        ("give --train-draft, or record --mode train", "give --train-draft, or record --mode train"),
        ("/data/train/serve.trace and 'training' stay", "/data/train/serve.trace and 'training' stay"),
    ],
)
def test_a_sentence_is_said_of_the_two_traces(text: str, said: str) -> None:
    assert Roles("A", "B", ("serve", "serve")).say(text) == said
    assert Roles().say(text) == text


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return serving(plant.HEALTHY[0], tmp_path_factory.mktemp("healthy"))


def faulty(cause: str, folder: Path) -> tuple[Planted, Trace]:
    case = next(one for one in plant.faults() if one.cause == cause)
    return case, serving(case, folder)


@pytest.mark.parametrize("cause", BETWEEN_SERVERS)
def test_a_cause_is_confirmed_between_a_healthy_and_a_faulty_server(cause: str, healthy: Trace, tmp_path: Path) -> None:
    case, other = faulty(cause, tmp_path)
    result = diagnosed(diff(healthy, other), healthy, other)
    assert result.diagnosis is not None
    assert [one.cause for one in result.diagnosis.confirmed] == [cause]
    assert result.first_divergence is not None
    assert result.first_divergence.site == case.site
    untested = {one.cause: one.evidence for one in result.diagnosis.of("not_tested")}
    assert untested["embedding-replaced"] == "no training trace"


def test_a_reference_that_does_not_compute_what_its_folder_says_confirms_nothing(
    healthy: Trace, tmp_path: Path
) -> None:
    """Its own steps are the control: where they cannot be recomputed, no step of the other is judged by them."""
    _, reference = faulty("norm-offset", tmp_path)
    result = diagnosed(diff(reference, healthy), reference, healthy)
    assert result.verdict == "diverged"
    assert result.diagnosis is not None
    assert not result.diagnosis.confirmed
