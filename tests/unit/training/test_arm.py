"""Commands that are recorded without being edited: how they are armed, and what comes back. No host is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_trace.errors import OutputExistsError, UsageError
from eagle_trace.monitor import options_of
from eagle_trace.recording.wanted import Wanted
from eagle_trace.selection import Selection
from eagle_trace_training import arm
from eagle_trace_training.command import SHIM, record_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [str(ROOT), str(ROOT / "recorders"), str(ROOT / "analysis")]

#: what `eagle_trace_training.arm` watches for, without torch
CORE = """
class Config:
    speculators_model_type = "eagle3"

class Base(list):
    def __call__(self):
        return self.forward()
class Eagle3DraftModel(Base):
    config = Config()
    def forward(self):
        return "forward"
"""


def python(code: str, *search: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(arm.PREFIX)}
    environment |= {"PYTHONPATH": os.pathsep.join([*search, *SOURCES])} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def test_what_is_asked_survives_the_environment() -> None:
    selection = Selection(("fc.*", "logits"), ((0, 8), (9, None)), ((0, 1),), ())
    wanted = Wanted(level="stats", selection=selection)
    found = arm._options(arm.environment(wanted, out=Path("/x/t.trace"), batches=3, first_token=0))
    assert found == {"out": "/x/t.trace", "batches": 3, "level": "stats", "first_token": 0, "selection": selection}


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="EAGLE_TRACE_TRAIN_BATCHES must be a number, not 'two'"):
        arm._options({"EAGLE_TRACE_TRAIN_BATCHES": "two"})


def test_nothing_is_watched_or_imported_where_nothing_is_asked_for() -> None:
    code = "import sys; print([type(f).__name__ for f in sys.meta_path if '_Watcher' in type(f).__name__]);"
    code += "print(sorted(m for m in ('torch', 'pyarrow', 'numpy', 'eagle_trace') if m in sys.modules))"
    assert python(code, str(SHIM)).stdout.split("\n")[:2] == ["[]", "[]"]
    armed = python(code, str(SHIM), EAGLE_TRACE_TRAIN_OUT="x").stdout.split("\n")
    assert armed[:2] == ["['_Watcher']", "[]"], "armed, it waits for the model's import and imports nothing itself"


def test_the_users_own_sitecustomize_is_run_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = __name__, __file__")
    done = python("import sys, sitecustomize; print(sys.mine, sitecustomize.__file__)", str(SHIM), str(tmp_path))
    own = str(tmp_path / "sitecustomize.py")
    assert done.stdout.strip() == f"('sitecustomize', {own!r}) {own}", done.stderr


def test_the_pth_file_arms_by_the_variable_alone(tmp_path: Path) -> None:
    (tmp_path / "eagle_trace_train.pth").write_text((ROOT / "recorders" / "eagle_trace_train.pth").read_text())
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print(type(sys.meta_path[0]).__name__)"
    assert python(code, EAGLE_TRACE_TRAIN_OUT="x").stdout.strip() == "_Watcher"
    unset = python(code + "; print('eagle_trace_speculators' in sys.modules)").stdout.split()
    assert unset[0] != "_Watcher"
    assert unset[1] == "False"


def test_a_model_that_cannot_be_recorded_trains_on(tmp_path: Path) -> None:
    folder = tmp_path / "speculators" / "models" / "eagle3"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "core.py").write_text(CORE)
    code = (
        "from speculators.models.eagle3.core import Eagle3DraftModel as M; print(M()(), M()(), '__call__' in vars(M))"
    )
    done = python(code, str(SHIM), str(tmp_path), EAGLE_TRACE_TRAIN_OUT=str(tmp_path / "t.trace"))
    assert done.stdout.strip() == "forward forward False"
    assert done.stderr.count("eagle-trace does not record this training") == 1


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_that_trains_nothing_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    recorded = record_command(command("pass"), out=tmp_path / "t.trace")
    assert recorded.status == 2
    assert "ran no forward of an EAGLE-3 draft" in recorded.problem
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_no_local_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = "import os; open('told', 'w').write(os.environ['EAGLE_TRACE_TRAIN_OUT'])"
    assert record_command(command(told), out="memory://t.trace").status == 2
    assert (tmp_path / "told").read_text() == "memory://t.trace"
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_the_commands_own_exit_status_comes_back(tmp_path: Path) -> None:
    assert record_command(command("raise SystemExit(7)"), out=tmp_path / "t.trace").status == 7
    killed = record_command(command("import os; os.kill(os.getpid(), 9)"), out=tmp_path / "t.trace")
    assert killed.status == 128 + 9, "as a shell says it"


def test_a_request_to_stop_reaches_the_command(tmp_path: Path) -> None:
    wait = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    assert record_command(command(wait), out=tmp_path / "t.trace").status == 128 + signal.SIGTERM


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-m", "eagle_trace.cli.main", "record", "--mode", "train", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES)}
    return subprocess.run(given, check=False, capture_output=True, text=True, env=environment)


def test_the_command_line_passes_output_and_status_through(tmp_path: Path) -> None:
    code = "import sys; print('trained'); print('warned', file=sys.stderr); sys.exit(5)"
    done = run("--out", str(tmp_path / "t.trace"), "--batches", "1", "--", *command(code))
    assert (done.returncode, done.stdout) == (5, "trained\n")
    assert done.stderr.startswith("warned\neagle-trace: ")
    assert "ended with status 5 and ran no forward" in done.stderr


def test_the_command_line_refuses_what_a_command_brings_itself(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "t.trace"), "--draft", "d", "--", "python", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--draft, --target" in done.stderr
    assert "needs --draft" in run("--out", str(tmp_path / "t.trace"), "--prompts", "p").stderr


def test_the_command_is_told_what_to_record(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = (
        f"import os; open({str(told)!r}, 'w').write(os.environ['EAGLE_TRACE_TRAIN_ROOTS'] + os.environ['PYTHONPATH'])"
    )
    record_command(command(code), out=tmp_path / "t.trace", selection=Selection(roots=((0, 4),)))
    assert told.read_text().startswith(f"0:4{SHIM}")


def test_what_makes_no_sense_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    ran = tmp_path / "ran"
    code = command(f"open({str(ran)!r}, 'w')")
    with pytest.raises(OutputExistsError):
        record_command(code, out=tmp_path)
    with pytest.raises(UsageError, match="no command 'no-such-trainer'"):
        record_command(["no-such-trainer"], out=tmp_path / "t.trace")
    (tmp_path / "no-program").write_text("neither a script nor a binary")
    (tmp_path / "no-program").chmod(0o755)
    with pytest.raises(UsageError, match=r"cannot run .*no-program: Exec format error"):
        record_command([str(tmp_path / "no-program")], out=tmp_path / "t.trace")
    with pytest.raises(UsageError, match="1 or more"):
        record_command(code, out=tmp_path / "t.trace", batches=0)
    assert not ran.exists()
    assert not (tmp_path / "t.trace").exists()


# ---- looking at a training


def test_a_training_is_looked_at_by_the_variable_alone(tmp_path: Path) -> None:
    (tmp_path / "eagle_trace_train.pth").write_text((ROOT / "recorders" / "eagle_trace_train.pth").read_text())
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print(type(sys.meta_path[0]).__name__);"
    code += "print([m for m in ('torch', 'pyarrow', 'numpy') if m in sys.modules])"
    assert python(code, EAGLE_TRACE_MONITOR="serve.trace").stdout.split("\n")[:2] == ["_Watcher", "[]"]
    assert python(code).stdout.split("\n")[0] != "_Watcher"


def test_a_training_that_cannot_be_looked_at_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "speculators" / "train"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "trainer.py").write_text("class Trainer:\n    def run_training(self, *words):\n        return words\n")
    code = "from eagle_trace import monitor; monitor.install(); from speculators.train.trainer import Trainer;"
    code += "print(Trainer().run_training(1, 2))"
    done = python(code, str(tmp_path), EAGLE_TRACE_MONITOR="/nowhere/serve.trace")
    assert done.stdout == "(1, 2)\n", done.stderr
    assert done.stderr.count("eagle-trace does not look at this training: ") == 1
    assert "Traceback" not in done.stderr


def test_what_the_environment_asks_of_looks_is_read() -> None:
    asked = {"EAGLE_TRACE_MONITOR": "s.trace", "EAGLE_TRACE_MONITOR_TARGET": "t", "EAGLE_TRACE_MONITOR_EVERY": "50"}
    assert options_of(asked) == {"served": "s.trace", "target": "t", "every": 50}
    with pytest.raises(UsageError, match="EAGLE_TRACE_MONITOR_EVERY must be a number, not 'often'"):
        options_of(asked | {"EAGLE_TRACE_MONITOR_EVERY": "often"})
