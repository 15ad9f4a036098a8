"""Hosts are found by name, and the only one that is installed without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_trace.errors import UsageError
from eagle_trace.recording import hosts
from eagle_trace.recording.hosts import find_host, has_own_forward

ABSENT = "no_such_program"


def host(name: str, kind: str, module: str = "json") -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        title=name.upper(),
        kind=kind,
        module=module,
        install=f"get {name}",
        takes=lambda draft: draft.name == name,
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What packages have registered."""
    there: list[SimpleNamespace] = []

    def entry_points(group: str) -> list[Any]:
        assert group == "eagle_trace.hosts"
        return [SimpleNamespace(name=one.name, load=lambda one=one: one) for one in there]

    monkeypatch.setattr(hosts, "entry_points", entry_points)
    return there


def refused(*asked: Any, **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        find_host(*asked, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_only_one_that_is_installed_needs_no_name(registered: list[SimpleNamespace]) -> None:
    registered += [host("one", "server"), host("two", "server", ABSENT), host("three", "trainer")]
    assert find_host("server").name == "one"
    assert find_host("trainer").name == "three"
    assert find_host("server", "one").name == "one"


def test_of_several_one_must_be_named(registered: list[SimpleNamespace]) -> None:
    registered += [host("two", "server"), host("one", "server")]
    assert "--host one|two" in refused("server")
    assert find_host("server", "two").name == "two"


def test_of_several_the_one_that_takes_the_draft_needs_no_name(registered: list[SimpleNamespace]) -> None:
    registered += [host("two", "trainer"), host("one", "trainer")]
    assert find_host("trainer", draft=Path("/drafts/two")).name == "two"
    assert find_host("trainer", "one", draft=Path("/drafts/two")).name == "one"
    with pytest.raises(UsageError, match=r"--host one\|two"):
        find_host("trainer", draft=Path("/drafts/three"))


def test_one_that_stands_in_for_a_program_is_chosen_for_its_own_drafts_alone(registered: list[SimpleNamespace]) -> None:
    ours = host("ours", "trainer")
    ours.stands_in = True
    registered += [host("two", "trainer"), ours]
    assert find_host("trainer", draft=Path("/drafts/ours")).name == "ours"
    assert find_host("trainer", draft=Path("/drafts/two")).name == "two"
    assert find_host("trainer", draft=Path("/drafts/three")).name == "two", (
        "the one program there is says what is wrong"
    )
    assert find_host("trainer").name == "two"
    assert find_host("trainer", "ours", draft=Path("/drafts/two")).name == "ours"
    assert [has_own_forward(Path("/drafts") / name) for name in ("ours", "two")] == [True, False]


def test_one_that_is_not_installed_comes_with_what_installs_it(registered: list[SimpleNamespace]) -> None:
    registered.append(host("one", "server", ABSENT))
    assert refused("server", "one") == "ONE is not installed here: get one"
    assert "one (get one)" in refused("server")
    assert find_host("server", "one", program=False).name == "one", "its client needs no program"


def test_a_name_that_nobody_has_comes_with_those_there_are(registered: list[SimpleNamespace]) -> None:
    registered += [host("one", "server"), host("other", "trainer")]
    assert refused("server", "nobody").startswith("no server is called 'nobody': --host takes one (get one)")
    assert refused("server", "other").startswith("other belongs to --mode train: --host takes one (get one)")


def test_where_nothing_is_registered_that_is_said(registered: list[SimpleNamespace]) -> None:
    assert not registered
    assert "no package records one" in refused("trainer")


def test_looking_at_the_hosts_imports_no_program() -> None:
    import ast
    import subprocess
    import sys

    code = (
        "import sys; from eagle_trace.recording.hosts import known_hosts, is_installed;"
        "found = known_hosts('server') | known_hosts('trainer'); print(sorted(found));"
        "[is_installed(host) for host in found.values()];"
        "heavy = ('sglang', 'specforge', 'speculators', 'vllm', 'torch', 'transformers', 'pyarrow');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names, loaded = done.stdout.splitlines()
    assert {"sglang", "speculators"} <= set(ast.literal_eval(names))
    assert loaded == "[]"
