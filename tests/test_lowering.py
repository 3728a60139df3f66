"""Every kernel variant of the shipped tile plan, assembled for sm_90 without a GPU: nothing spills, loads are wide."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", "3.6")  # whose assembler's report can be read
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reports():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), environment.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, HERE / "lowering.py"], env=environment, capture_output=True, text=True, timeout=500
    )
    if "Unsupported .version" in run.stderr:
        pytest.skip("the assembler is older than what this Triton writes for it")
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_nothing_spills(reports):
    assert len(reports) > 200
    assert not [r for r in reports if r["spilled"]]


def test_shared_memory_is_enough(reports):
    assert not [r for r in reports if r["shared"] > 227 * 1024]


def test_no_two_threads_wait_for_the_same_word(reports):
    """They might see it at different times, and only one of them would go on: unless each waits alone."""
    waiting = {r["variant"]: r["told_apart"] for r in reports if r["told_apart"] is not None}
    assert {"gae 1x1000000", "gae 64x16384", "vtrace 64x16383"} <= set(waiting) and all(waiting.values())


def test_adjoints_are_among_them(reports):
    derived = {r["variant"].split()[0] for r in reports}
    assert {"gae'", "gae+", "vtrace'", "td0'", "retrace'", "decoupled_gae'", "backward_recurrence'"} <= derived


def test_the_fused_retrace_is_among_them(reports):
    fused = {r["variant"] for r in reports if "actions" in r["variant"]}
    side_by_side = {
        f"retrace {shape} time-major 6 actions" for shape in ("32768x512", "8192x2048", "4096x4096", "64x16384")
    }
    assert fused == {f"retrace 512x{T} {A} actions" for T in (4096, 8192) for A in (4, 18, 64)} | side_by_side


def test_rows_are_loaded_four_numbers_at_a_time(reports):
    variants = {f"gae {shape}" for shape in ("4096x128", "65536x256", "4096x2048", "16384x1001", "131072x127")}
    dense = [r for r in reports if r["variant"] in variants]
    assert len(dense) == len(variants) and all(r["vector_loads"] >= 3 for r in dense)  # reward, value, next value


def test_a_direct_launch_passes_what_the_kernel_takes(reports):
    launched = [r for r in reports if r["passed"]]
    assert len(launched) > 100
    assert not [r["variant"] for r in launched if r["passed"] != r["parameters"]]


WORK = {  # of every launch: shuffles, loads of one number at a time, conversions of layout
    "gae 32768x8": [(4, 2, 0)],
    "gae 4096x128": [(12, 2, 0)],
    "gae 65536x256": [(24, 4, 0)],
    "gae 8192x16384": [(26, 0, 0)],
    "gae 1x1000000": [(96, 10, 2)],
    "gae 65536x256 time-major": [(20, 0, 0)],
    "gae 16384x1024 time-major": [(36, 0, 3)],
    "gae 4096x4096 time-major": [(60, 0, 3)],
    "gae 64x16384 time-major": [(169, 11, 7)],
    "gae 4096x4096 time-major masked": [(130, 0, 6)],
    "gae 4096x128 shifted": [(12, 6, 0)],
    "gae 4096x4096 shifted": [(14, 0, 0)],
    "gae 4096x128 masked": [(24, 8, 0)],
    "gae 4096x4096 masked": [(30, 0, 0)],
    "gae' 4096x128": [(24, 3, 0)],
    "td_lambda 65536x256": [(24, 4, 0)],
    "discounted_return 65536x256": [(24, 4, 0)],
    "vtrace 65536x256": [(24, 6, 0)],
    "vtrace 4096x4096 masked": [(39, 0, 0)],
    "vtrace' 4096x128": [(24, 7, 0)],
    "retrace 65536x256": [(24, 14, 0)],
    "retrace 512x4096 4 actions": [(91, 24, 5)],
    "eligibility_trace 65536x256": [(24, 4, 0)],
    "prefix_sum_ends_at 65536x256": [(24, 4, 0)],
}


@pytest.mark.parametrize("variant", WORK)
def test_a_kernel_does_no_more_than_it_did(reports, variant):
    launches = [r for r in reports if r["variant"].replace(" summary", "") == variant]
    work = [tuple(r[name] for name in ("shuffles", "scalar_loads", "conversions")) for r in launches]
    assert len(work) == len(WORK[variant]), work
    assert all(x <= y for got, most in zip(work, WORK[variant], strict=True) for x, y in zip(got, most, strict=True)), (
        f"{work}, at most {WORK[variant]}"
    )
