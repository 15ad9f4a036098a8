"""Target classes that cannot feed a draft: told by `check` from a table, by `record` from the installed sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import CheckpointError, HostError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.finding import Status
from eagle_trace_analysis.engines.sglang.target_classes import NO_CAPTURE, NO_EMBEDDING, SERVES, SINCE
from eagle_trace_serving.releases import Releases
from eagle_trace_sglang import targets
from tests.support import checkpoints as make
from tests.support.check_cases import Folders, flat_config, named, only, write_healthy


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_healthy(tmp_path_factory.mktemp("healthy"))


def write_target(folder: Path, architectures: Any, *, nested: bool = False) -> Path:
    """A target's config alone; `nested` as a multimodal one has it."""
    own = make.decoder_config(make.LAYERS)
    config = {"model_type": "wrapper", "text_config": own | {"architectures": None}} if nested else own
    return make.write_checkpoint(folder, config | {"architectures": architectures}, make.target_tensors())


@pytest.mark.parametrize(
    ("architectures", "nested", "status", "words"),
    [
        (["LlamaForCausalLM"], False, Status.PASS, "feeds EAGLE-3 drafts"),
        (["MistralForCausalLM"], False, Status.PASS, "feeds EAGLE-3 drafts"),
        (["Qwen3VLMoeForConditionalGeneration"], True, Status.PASS, "feeds EAGLE-3 drafts"),
        (["ExaoneMoeForCausalLM"], False, Status.PASS, "from 0.5.22 on"),
        (["HunYuanDenseV1ForCausalLM"], False, Status.FAIL, "set_eagle3_layers_to_capture"),
        (["Mistral3ForConditionalGeneration"], True, Status.FAIL, "set_eagle3_layers_to_capture"),
        (["Qwen2MoeForCausalLM"], False, Status.FAIL, "get_embed_and_head"),
        (["Unheard", "GraniteForCausalLM"], False, Status.FAIL, "GraniteForCausalLM"),
        (["MyOwnForCausalLM"], False, Status.SKIP, "not among the classes"),
        (None, False, Status.SKIP, "names no class"),
        ([], True, Status.SKIP, "names no class"),
    ],
)
def test_a_target_class_passes_fails_or_is_not_checked_by_name(
    healthy: Folders, tmp_path: Path, architectures: Any, nested: bool, status: Status, words: str
) -> None:
    result = check(healthy.flat, target=write_target(tmp_path, architectures, nested=nested))
    finding = named(result, "target-class")
    assert (finding.status, words in finding.evidence) == (status, True), finding
    if status is Status.FAIL:
        only(result, "target-class")


def test_no_target_given_means_not_checked(healthy: Folders) -> None:
    assert named(check(healthy.flat), "target-class").status is Status.SKIP


def test_a_class_that_feeds_its_last_layer_is_not_accused_where_the_draft_asks_for_no_more(
    healthy: Folders, tmp_path: Path
) -> None:
    config = flat_config(healthy)
    config["eagle_config"]["use_aux_hidden_state"] = False
    draft = make.write_checkpoint(tmp_path / "draft", config, make.draft_tensors())
    target = write_target(tmp_path / "target", ["GraniteForCausalLM"])
    assert named(check(draft, target=target), "target-class").status is Status.SKIP


def test_tables_do_not_overlap() -> None:
    assert not (SERVES & NO_CAPTURE | SERVES & NO_EMBEDDING | NO_CAPTURE & NO_EMBEDDING)
    assert {name for names in SINCE.values() for name in names} <= SERVES


SOURCES = {
    "plain": """
class PlainForCausalLM:
    def get_embed_and_head(self): ...
    def set_eagle3_layers_to_capture(self, ids=None): ...
EntryClass = PlainForCausalLM
""",
    "heirs": """
from sglang.srt.models.plain import PlainForCausalLM as Base
from sglang.srt.models.bare import BareForCausalLM
class HeirForCausalLM(Base):
    pass
class BareForCausalLM(BareForCausalLM):
    def get_embed_and_head(self): ...
class CircleForCausalLM(CircleForCausalLM):
    pass
EntryClass = [HeirForCausalLM, BareForCausalLM, CircleForCausalLM]
""",
    "bare": """
class BareForCausalLM:
    pass
class PlainForCausalLM:
    pass
""",
    "broken": "class BrokenForCausalLM(:\n",
}


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed SGLang whose models are SOURCES."""
    folder = tmp_path / "srt"
    (folder / "models").mkdir(parents=True)
    for name, text in SOURCES.items():
        (folder / "models" / f"{name}.py").write_text(text)
    monkeypatch.setattr(Releases, "installed", lambda _releases: ("0.5.99", folder))
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    return folder


@pytest.mark.parametrize(
    ("name", "draft", "words"),
    [
        ("PlainForCausalLM", {}, ""),
        ("HeirForCausalLM", {}, ""),
        ("BareForCausalLM", {}, "BareForCausalLM: the class has no set_eagle3_layers_to_capture,"),
        ("BareForCausalLM", {"eagle_config": {"use_aux_hidden_state": False}}, ""),
        ("CircleForCausalLM", {}, "no get_embed_and_head and no set_eagle3_layers_to_capture"),
        ("BrokenForCausalLM", {}, ""),
        ("ElsewhereForCausalLM", {}, ""),
    ],
)
def test_record_asks_the_installed_sources_before_anything_starts(
    release: Path, name: str, draft: dict[str, Any], words: str
) -> None:
    if not words:
        targets.check_classes({"architectures": [name]}, draft)
        return
    with pytest.raises(HostError, match=f"SGLang 0.5.99 cannot serve.*{words}"):
        targets.check_classes({"architectures": [name]}, draft)


def test_a_draft_class_that_the_installed_sglang_does_not_have_is_refused(release: Path) -> None:
    target = {"architectures": ["PlainForCausalLM"]}
    with pytest.raises(CheckpointError, match=r"no class Eagle3LlamaForCausalLM.*LlamaForCausalLMEagle3"):
        targets.check_classes(target, {"architectures": ["Eagle3LlamaForCausalLM"]})
    targets.check_classes(target, {"architectures": ["HeirForCausalLM"]})


def test_another_algorithm_or_package_is_left_to_sglang(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {"architectures": ["BareForCausalLM"]}
    targets.check_classes(bare, {}, ["--speculative-algorithm", "EAGLE"])
    targets.check_classes({"architectures": None}, {})
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine")
    targets.check_classes(bare, {})
