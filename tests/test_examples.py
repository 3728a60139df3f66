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
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "common.py")


def run(path, out, *options):
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return subprocess.run(
        [sys.executable, str(path), "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_few_frames(path, tmp_path):
    done = run(path, tmp_path, "--frames", "2048", "--seed", "3")
    # status 1 with this message: so few frames teach nothing
    assert done.returncode == 1 and done.stderr.rstrip().splitlines()[-1].startswith("FAILED: the mean"), done.stderr
    assert re.search(r"^mean return of the last \d+ training episodes: -?\d", done.stdout, re.MULTILINE)
    assert re.search(r"^wall time: [\d.]+ s, of which [\d.]+ % in the estimator", done.stdout, re.MULTILINE)
    (plot,) = tmp_path.iterdir()
    assert plot.stem.startswith(path.stem) and plot.read_bytes().startswith(b"\x89PNG")
    assert f"learning curve: {plot}" in done.stdout


def test_impala_is_off_policy(tmp_path):
    done = run(ROOT / "examples" / "impala_cartpole.py", tmp_path, "--frames", "4096")
    (lag,) = re.findall(r"mean \|pi/mu - 1\| is ([\d.]+)", done.stdout)
    assert float(lag) > 0.001, done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_same_with_torchrl(path, tmp_path):
    if "--estimator" not in run(path, tmp_path, "--help").stdout:
        pytest.skip("TorchRL has no such estimator")
    done = run(path, tmp_path, "--frames", "2048", "--estimator", "torchrl")
    assert "learning curve: " in done.stdout, done.stderr
