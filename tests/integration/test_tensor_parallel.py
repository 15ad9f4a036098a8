"""SGLang on two ranks: each writes its own part, and together they are the trace that one rank writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from eagle_trace import Trace
from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.params import parameter_row
from eagle_trace_analysis import diff
from eagle_trace_analysis.comparison.params import same
from sglang_cpu_eagle import cpu_environment
from tests.support.pairs import TARGET

pytestmark = pytest.mark.integration

Make = Callable[..., Trace]

SPLIT = {f"layer.0.{site}" for site in ("attn.q", "attn.k", "attn.v", "attn.q_rope", "attn.k_rope", "attn.context")}
SPLIT |= {f"layer.0.{site}" for site in ("mlp.gate", "mlp.up", "mlp.act")}


@pytest.fixture(scope="session")
def two_ranks(serve: Make) -> Trace:
    return serve(host_args=("--tp", "2"))


def stored(trace: Trace, site: str, rank: int) -> tuple[int, list[bytes]]:
    """Width of what a rank wrote of a site, and its rows."""
    files = sorted((Path(trace.path) / "values" / f"site={site}").glob(f"rank{rank}-*.parquet"))
    tables = [pq.ParquetFile(file).read() for file in files]
    widths = {int(table.schema.metadata[b"eagle_trace.width"]) for table in tables}
    assert len(widths) == 1, site
    return widths.pop(), [row for table in tables for row in table.column("values").to_pylist()]


def test_two_ranks_answer_as_one_does(serve: Make, two_ranks: Trace) -> None:
    one = serve()
    for mine, theirs in zip(one.prompts.itertuples(), two_ranks.prompts.itertuples(), strict=True):
        assert list(mine.output_ids) == list(theirs.output_ids)
        assert list(mine.token_ids) == list(theirs.token_ids)
    assert one.manifest.settings["server_counts"] == two_ranks.manifest.settings["server_counts"]
    assert two_ranks.manifest.ranks == 2


def test_both_ranks_record_the_rows_that_one_would(serve: Make, two_ranks: Trace) -> None:
    one = serve()
    assert two_ranks.sites == one.sites
    assert two_ranks.shapes == one.shapes
    assert len(two_ranks.rounds) == len(one.rounds)
    for site in one.sites:
        mine, theirs = one.keys(site), two_ranks.keys(site)
        for column in ("prompt_id", "root", "step", "round", "token_id", "position", "path"):
            np.testing.assert_array_equal(getattr(mine, column), getattr(theirs, column), err_msg=f"{site} {column}")


def test_split_sites_are_put_together_and_all_others_are_the_same_on_both_ranks(serve: Make, two_ranks: Trace) -> None:
    one = serve()
    for site in one.sites:
        whole = one.values(site)
        (width, rows), (_, others) = (stored(two_ranks, site, rank) for rank in (0, 1))
        assert len(rows) == len(others) == len(whole), site
        if site in SPLIT:
            assert width * 2 == whole.shape[1], site
            assert rows != others, site
        else:
            assert width == whole.shape[1], site
            # also where a rank adds up what the ranks computed: a sum that was left unfinished differs
            assert rows == others, site
        joined = two_ranks.values(site)
        assert joined.shape == whole.shape, site
        assert np.linalg.norm(joined - whole) <= 3e-6 * np.linalg.norm(whole), site
        mine, theirs = one.statistics(site), two_ranks.statistics(site)
        np.testing.assert_allclose(theirs.norm, mine.norm, rtol=1e-5, err_msg=site)
        np.testing.assert_allclose(theirs.mean, mine.mean, atol=1e-5, err_msg=site)
        np.testing.assert_allclose(theirs.absmax, mine.absmax, rtol=1e-4, err_msg=site)


def test_parameters_are_wholes_again(serve: Make, two_ranks: Trace) -> None:
    one, two = (trace.params.set_index("canonical_name") for trace in (serve(), two_ranks))
    assert list(one.index) == list(two.index)
    for name, whole in one.iterrows():
        joined = two.loc[name]
        assert list(joined["shape"]) == list(whole["shape"]), name
        assert joined["norm"] == pytest.approx(whole["norm"], rel=1e-13), name
        assert joined["in_checkpoint"], name
        # no rank had all the bytes of a parameter that is split
        assert joined["digest"] in ("", whole["digest"]), name
    assert two.loc["fc.weight", "digest"] == one.loc["fc.weight", "digest"]
    assert two.loc["layers.0.self_attn.q_proj.weight", "digest"] == ""


def test_the_training_forward_agrees_with_two_ranks(two_ranks: Trace, train: Make) -> None:
    trained = train(replay=two_ranks.path)
    result = diff(trained, two_ranks)
    assert result.verdict == "agree", result.first_divergence
    assert result.captures.matched > 5000
    assert result.coverage.matched == result.coverage.train_rows

    served = two_ranks.params.set_index("canonical_name")
    for name, row in trained.params.set_index("canonical_name").iterrows():
        if name in served.index:
            assert same(served.loc[name], row), name
    doubled = served.loc["lm_head.weight"].copy()
    doubled["norm"] *= 1 + 1e-6
    assert not same(doubled, trained.params.set_index("canonical_name").loc["lm_head.weight"])


# ---- four ranks, of which two share each key/value head -------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks(deployed: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.sharded_draft", str(deployed), str(TARGET), "4"]
    done = subprocess.run(command, env=cpu_environment(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ranks_that_share_a_head_hold_the_same_part(four_ranks: list[dict[str, Any]]) -> None:
    for rank, held in enumerate(four_ranks):
        parts = {site: (part["index"], part["count"]) for site, part in held["sites"].items() if part}
        assert set(parts) == SPLIT
        shared = {f"layer.0.attn.{site}" for site in ("k", "v", "k_rope")}
        assert {site: parts[site] for site in shared} == dict.fromkeys(shared, (rank // 2, 2))
        assert {site: parts[site] for site in SPLIT - shared} == dict.fromkeys(SPLIT - shared, (rank, 4))


def test_every_part_of_a_parameter_is_where_it_says_in_the_checkpoint(
    four_ranks: list[dict[str, Any]], deployed: Path
) -> None:
    whole = {canonical_name(name): tensor for name, tensor in load_file(deployed / "model.safetensors").items()}
    for number, first in enumerate(four_ranks[0]["params"]):
        name = first["canonical_name"]
        parts = {held["params"][number]["shard_index"] or 0: held["params"][number] for held in four_ranks}
        axis, start = first["shard_axis"] or 0, 0
        assert len(parts) == (first["shard_count"] or 1), name
        for _, part in sorted(parts.items()):
            size = part["shape"][axis]
            if name in whole:
                # SGLang holds float32 here, whatever is stored
                piece = whole[name].narrow(axis, start, size)
                piece = piece if name == "d2t" else piece.float()
                assert parameter_row("", "", piece, in_checkpoint=True)["digest"] == part["digest"], name
            start += size
        if name in whole:
            assert start == whole[name].shape[axis], name
    # 80 rows padded to 128: the last rank of four has only padding
    assert [held["params"][-2]["shape"][0] for held in four_ranks] == [32, 32, 16, 0]
    assert {held["params"][-2]["canonical_name"] for held in four_ranks} == {"lm_head.weight"}


def test_a_sum_that_is_left_unfinished_is_no_site(four_ranks: list[dict[str, Any]]) -> None:
    assert {tuple(held["partial"]) for held in four_ranks} == {()}
    assert {tuple(held["unreduced"]) for held in four_ranks} == {("layer.0.attn.out",)}
