"""Which SGLang is supported: asked of its metadata and its sources, before anything of it is imported."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle_trace.cli import main
from eagle_trace.errors import HostError
from eagle_trace.extras import way_to
from eagle_trace_serving import releases
from eagle_trace_serving.sources import HookPoint
from eagle_trace_sglang.releases import HOOK_POINTS, SAMPLING, TESTED, WRONG_ON_CPU, check_release, missing_names
from tests.support.pairs import DRAFT, TARGET

Install = Callable[..., Path]


def source_of(names: Sequence[str]) -> str:
    """A module with these names: functions and classes, methods and fields, some of them behind an `if`."""
    lines: list[str] = []
    for name in names:
        owner, _, _ = name.rpartition(".")
        if not owner:
            lines.append(f"if True:\n    def {name}(): pass")
            continue
        lines.append(f"class {owner}:")
        inners = [one.rpartition(".")[2] for one in names if one.startswith(f"{owner}.")]
        lines += [f"    {one}: object = None\n    def use_{one}(self): pass" for one in inners]
    return "\n".join(lines) + "\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package `sglang` of our own before any other; `without` leaves out a hook point's names."""
    monkeypatch.delitem(sys.modules, "sglang", raising=False)

    def run(version: str | None, without: Sequence[str] = ()) -> Path:
        srt = tmp_path / "sglang" / "srt"
        for file in {point.file for point in (*HOOK_POINTS, SAMPLING)}:
            names = [name for p in (*HOOK_POINTS, SAMPLING) if p.file == file for name in p.names]
            kept = [name for name in names if name not in without]
            (srt / file).parent.mkdir(parents=True, exist_ok=True)
            (srt / file).write_text(source_of(kept))
        # importing it would fail: nobody may
        (tmp_path / "sglang/__init__.py").write_text("raise RuntimeError('imported')\n")
        if version:
            info = tmp_path / f"sglang-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return srt

    return run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("version", TESTED)
def test_a_tested_release_is_taken_without_a_word(install: Install, version: str, device: str) -> None:
    install(version)
    assert check_release(device) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_untested_release_with_every_hook_point_is_taken_with_a_warning(install: Install, device: str) -> None:
    install("0.6.0")
    (warning,) = check_release(device)
    assert "SGLang 0.6.0 is not among the releases" in warning


@pytest.mark.parametrize(
    ("point", "name"),
    [pytest.param(p, name, id=f"{p.file}:{name}") for p in HOOK_POINTS for name in p.names],
)
def test_a_release_that_lacks_a_hook_point_is_refused_by_name(install: Install, point: HookPoint, name: str) -> None:
    install("0.6.0", without=[name])
    refusal = rf"SGLang 0\.6\.0 is not supported on cpu: it has no .*{name} in {point.file}"
    with pytest.raises(HostError, match=refusal) as error:
        check_release("cpu")
    assert f"Supported are {', '.join(TESTED)}" in str(error.value)
    assert f"pip install 'sglang=={TESTED[0]}'" in str(error.value)
    if point.cpu:
        assert len(check_release("cuda")) == 1
    else:
        with pytest.raises(HostError, match="not supported on cuda"):
            check_release("cuda")


def test_a_file_that_is_not_there_lacks_all_its_names(install: Install) -> None:
    srt = install("0.6.0")
    (srt / HOOK_POINTS[0].file).unlink()
    assert missing_names(srt, HOOK_POINTS[0]) == list(HOOK_POINTS[0].names)
    (srt / HOOK_POINTS[1].file).write_text("def broken(:\n")
    assert missing_names(srt, HOOK_POINTS[1]) == list(HOOK_POINTS[1].names)


@pytest.mark.parametrize("version", WRONG_ON_CPU)
def test_a_release_that_is_wrong_on_a_cpu_is_refused_there_only(install: Install, version: str) -> None:
    install(version)
    with pytest.raises(HostError, match=r"not supported on cpu: its CPU attention.*Supported are"):
        check_release("cpu")
    assert len(check_release("cuda")) == 1


def test_a_release_that_verifies_greedily_on_a_cpu_says_so(install: Install) -> None:
    install(TESTED[-1], without=SAMPLING.names)
    (warning,) = check_release("cpu")
    assert "verifies greedily" in warning
    assert check_release("cuda") == []


def test_a_source_tree_without_metadata_is_taken_with_a_warning(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise releases.PackageNotFoundError(name)

    install(None)
    monkeypatch.setattr(releases, "version", unknown)
    assert "of an unknown version" in check_release("cpu")[0]


def test_no_sglang_at_all_is_told_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(HostError, match=re.escape(f"SGLang is not installed here: {way_to('serve')}")):
        check_release("cpu")


def test_names_are_found_however_a_module_comes_to_have_them(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import a.b as c\nfrom d import e as f, g\nx: int = 1\ny = z = 2\n"
        "try:\n    from h import i\nexcept ImportError:\n    j = None\n"
        "if x:\n    class K:\n        field: int\n        def method(self): pass\nelse:\n    def lost(): pass\n"
    )
    names = ("c", "f", "g", "x", "y", "z", "i", "j", "K", "K.field", "K.method", "lost", "a", "e", "K.other", "method")
    assert missing_names(tmp_path, HookPoint("m.py", names, "")) == ["a", "e", "K.other", "method"]


def test_record_refuses_an_unsupported_release_before_it_starts_anything(install: Install, tmp_path: Path) -> None:
    from eagle_trace_analysis.checkpoint.export import export

    install("0.5.10", without=HOOK_POINTS[0].names)
    export(DRAFT, tmp_path / "deployed", target=TARGET)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "p", "input_ids": [1, 2, 3]}\n')
    paths = ["--target", str(TARGET), "--draft", str(tmp_path / "deployed"), "--prompts", str(prompts)]
    out = tmp_path / "out.trace"
    result = CliRunner().invoke(main.app, ["record", "--mode", "serve", *paths, "--out", str(out), "--device", "cpu"])
    assert result.exit_code == 2
    assert "SGLang 0.5.10 is not supported on cpu" in result.stderr
    assert "plugins/hook_registry.py" in result.stderr
    assert "starting SGLang" not in result.stderr
    assert not out.exists()
