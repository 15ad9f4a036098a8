"""What is said of the forward that is recorded: whose it is, why, and what the folder tells of its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_trace.jobs.chosen import chosen
from eagle_trace.recording.hosts import known_hosts
from eagle_trace_analysis.trainers import TRAINERS
from tests.support.latent import write_draft
from tests.support.pairs import DRAFT
from tests.support.published_heads import HEADS

HOSTS = known_hosts("trainer")
#: a head of each trainer that a folder can be told to be of, by what the sentence calls it
OF = {
    trainer.TITLE: next(head for head in HEADS if head.trainer == name and not head.bin)
    for name, trainer in TRAINERS.items()
    if name not in ("speculators", "eagle")
}


def test_speculators_own_folder_is_said_to_be_that() -> None:
    said = chosen(HOSTS["speculators"], DRAFT, named=False)
    assert (
        said
        == "the forward is that of speculators, since the folder is one that speculators saved (--host takes another)"
    )


@pytest.mark.parametrize("title", OF)
def test_a_flat_folder_is_said_to_be_the_reason_and_another_trainer_is_named(title: str, tmp_path: Path) -> None:
    said = chosen(HOSTS["specforge"], OF[title].write(tmp_path)[0], named=False)
    assert said.startswith(
        "the forward is that of SpecForge, since the folder is flat, in the format that servers load ("
    )
    assert (f"the folder was written by {title}" in said) == (title != "SpecForge")
    assert (f"what {title} computes otherwise is not seen" in said) == (title != "SpecForge")


def test_a_host_that_was_named_is_the_reason_itself(tmp_path: Path) -> None:
    said = chosen(HOSTS["specforge"], tmp_path, named=True)
    assert said == "the forward is that of SpecForge, since --host specforge says so"


def test_a_latent_draft_comes_with_why_no_trainer_is_recorded(tmp_path: Path) -> None:
    said = chosen(HOSTS["reference"], write_draft(tmp_path / "draft"), named=False)
    latent = "its attention is latent (MLA), which no trainer that can be recorded has"
    assert said == f"the forward is that of eagle-trace's own reference, since {latent}"
