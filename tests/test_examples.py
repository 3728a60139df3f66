"""Every example, run for a few frames as a user runs it: it ends with its plot and its summary."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

ROOT = Path(__file__).parent.parent
EXAMPLES = [
    ("ppo_cartpole", "--estimator", "rl_triton_td"),
    ("ppo_cartpole", "--estimator", "torchrl"),
    ("ppo_pendulum", "--estimator", "rl_triton_td"),
    ("ppo_pendulum", "--estimator", "torchrl"),
    ("impala_cartpole", "--estimator", "rl_triton_td"),
    ("impala_cartpole", "--estimator", "torchrl"),
    ("retrace_cartpole", "--trace", "retrace"),
]


def run(name, *options):
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
    )


def test_every_example_is_run_here():
    assert {name for name, *_ in EXAMPLES} | {"common"} == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option", "choice"), EXAMPLES)
def test_a_few_frames(name, option, choice, tmp_path):
    done = run(name, option, choice, "--frames", "2048", "--seed", "3", "--out", str(tmp_path))
    # it says that so few frames teach nothing, and nothing else goes wrong
    assert done.returncode == 1 and done.stderr.rstrip().splitlines()[-1].startswith("FAILED: the mean"), done.stderr
    plot = tmp_path / f"{name}_{choice}_3.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^mean return of the last \d+ training episodes: -?\d", done.stdout, re.MULTILINE)
    assert f"learning curve: {plot}" in done.stdout
    if name == "impala_cartpole":
        (lag,) = re.findall(r"mean \|pi/mu - 1\| is ([\d.]+)", done.stdout)
        assert float(lag) > 0, "the workers' policies are not stale"
