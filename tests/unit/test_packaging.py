"""What is installed: all packages and data, nothing else, and a core that needs no host."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eagle_trace.extras import way_to

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: makes an import of a host fail, as on a machine where it is not installed
WITHOUT_HOSTS = """
import sys

class NoHosts:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sglang", "vllm", "speculators", "specforge", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, NoHosts())
sys.argv[0] = "eagle-trace"
from eagle_trace.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_the_wheel_holds_all_packages_and_no_tests(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel if ".dist-info" not in name}
    packages = {
        "eagle_trace", "eagle_trace_analysis", "eagle_trace_reference", "eagle_trace_serving", "eagle_trace_sglang",
        "eagle_trace_specforge", "eagle_trace_speculators", "eagle_trace_training", "eagle_trace_vllm",
        "sglang_cpu_eagle",
    }  # fmt: skip
    assert tops == {*packages, "eagle_trace_train.pth"}


@pytest.mark.parametrize(
    "file",
    [
        "eagle_trace/py.typed",
        "eagle_trace_analysis/report/templates/report.html",
        "eagle_trace_analysis/report/templates/body.html",
        "eagle_trace_analysis/report/assets/report.css",
        "eagle_trace/demo/prompts.jsonl",
        "eagle_trace/demo/models/target/model.safetensors",
        "eagle_trace/demo/models/draft/model.safetensors",
        "eagle_trace/demo/models/kimi/target/processing_tiny.py",
        "eagle_trace/demo/models/kimi/draft/model.safetensors",
        "sglang_cpu_eagle/shim/sgl_kernel/__init__.py",
        "eagle_trace_training/shim/sitecustomize.py",
    ],
)
def test_the_wheel_holds_what_is_needed_at_run_time(wheel: list[str], file: str) -> None:
    assert file in wheel


def run_without_hosts(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_HOSTS, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["diff", "tests/golden/train.trace", "tests/golden/healthy.trace"], 0),
        (["diff", "tests/golden/train.trace", "tests/golden/broken.trace"], 1),
        (["show", "tests/golden/healthy.trace"], 0),
        (["check", "eagle_trace/demo/models/draft", "--target", "eagle_trace/demo/models/target"], 0),
    ],
)
def test_the_core_works_where_no_host_is_installed(arguments: list[str], status: int) -> None:
    done = run_without_hosts(*arguments)
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("mode", ["train", "serve"])
def test_recording_without_its_host_says_what_to_install(mode: str, tmp_path: Path) -> None:
    from tests.support.pairs import DRAFT, TARGET

    done = run_without_hosts(
        "record", "--mode", mode, "--target", str(TARGET), "--draft", str(DRAFT),
        "--prompts", "eagle_trace/demo/prompts.jsonl", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if mode == "train":
        assert way_to("train") in done.stderr


def test_help_loads_nothing_heavy() -> None:
    heavy = ("pyarrow", "pandas", "numpy", "torch")
    code = f"import sys; import eagle_trace.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_specforge_that_is_installed_for_the_tests_is_one_that_is_recorded() -> None:
    releases = (ROOT / "recorders" / "eagle_trace_specforge" / "releases.py").read_text(encoding="utf-8")
    tested = releases.split('TESTED = ("')[1].split('"')[0]
    for file in ("Makefile", "docs/support.md", "docs/specforge.md", "recorders/eagle_trace_specforge/host.py"):
        assert f"specforge=={tested}" in (ROOT / file).read_text(encoding="utf-8"), file
