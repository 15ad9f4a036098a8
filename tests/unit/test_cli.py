"""Exit statuses of the command line that no command of its own decides."""

import pytest
from typer.testing import CliRunner

from eagle_trace.cli import main


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--version"], 0), (["--help"], 0), (["no-such-command"], 2), (["diff"], 2), (["show", "nowhere"], 2)],
)
def test_what_cannot_be_done_is_two(arguments: list[str], status: int) -> None:
    assert CliRunner().invoke(main.app, arguments).exit_code == status


def test_a_bug_keeps_its_traceback_and_is_not_taken_for_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle_trace.reader

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(eagle_trace.reader, "open_trace", broken)
    result = CliRunner().invoke(main.app, ["show", "nowhere"])
    assert result.exit_code == main.BUG
    assert "ZeroDivisionError: a bug" in result.stderr


def test_ctrl_c_is_not_taken_for_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle_trace.reader

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(eagle_trace.reader, "open_trace", interrupted)
    assert CliRunner().invoke(main.app, ["show", "nowhere"]).exit_code == main.INTERRUPTED
