"""The benchmarks run, verify and report, on tiny CPU shapes."""

import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are not installed

from benchmarks import __main__ as cli  # noqa: E402
from benchmarks import measure, registry, report  # noqa: E402
from benchmarks.suites import SUITES, Shape  # noqa: E402

EAGER = ("ours", "ours_out", "module", "module_out", "torchrl_serial", "torchrl_vec")


@pytest.mark.parametrize("layout", ["rows", "time", "sliced"])
@pytest.mark.parametrize("name", registry.ROWS)
def test_contenders_agree_with_the_reference(name, layout):
    case = measure.Case(registry.ROWS[name], Shape(3, 17, layout), "cpu")
    answered = 0
    for contender in EAGER:
        try:
            call, fresh = registry.CONTENDERS[contender](case.row, case.d)
        except registry.Unavailable:
            continue
        assert case.check(call(fresh()), contender) < 1e-4
        answered += 1
    if case.row.scan is not None:
        assert case.check(case.row.scan(registry.flat(case.d), registry.doubling), "doubling") < 1e-4
    assert answered >= 1


def test_a_wrong_output_is_not_timed(monkeypatch):
    case = measure.Case(registry.ROWS["gae"], Shape(2, 5), "cpu")
    monkeypatch.setitem(registry.CONTENDERS, "wrong", lambda row, d: (lambda _: (like + 1, like), lambda: None))
    like = registry.like(case.d)
    figures = case.measure("wrong", True, 10)
    assert figures["note"].startswith("not timed") and figures["call_us"] is None


def test_contenders_are_timed_in_turn(monkeypatch):
    """One round of each before the next of any; of large inputs, one contender after the other."""
    case, called, times = measure.Case(registry.ROWS["gae"], Shape(2, 5), "cpu"), [], itertools.count(20, -1)
    outputs = registry.CONTENDERS["ours"](case.row, case.d)[0](None)
    for name, seconds in (("first", 0), ("second", 0), ("slow", 0.15)):

        def call(_, name=name, seconds=seconds):
            called.append(name)
            time.sleep(seconds)
            return outputs

        monkeypatch.setitem(registry.CONTENDERS, name, lambda row, d, call=call: (call, lambda: None))
    monkeypatch.setattr(measure, "full_call_us", lambda *_: next(times))
    figures = dict(case.in_turn(("first", "second"), True, 60))
    assert [name for name, _ in itertools.groupby(called)] == ["first", "second"] * 4  # made ready, three loops
    assert {name: f["call_us"] for name, f in figures.items()} == {"first": 12, "second": 11}  # of 20, 18, …; 19, 17, …
    called.clear()

    figures = dict(case.in_turn(("first", "nobody", "slow", "second"), True, 0.5))
    assert list(figures) == ["first", "nobody", "slow", "second"]
    assert figures["nobody"]["note"].startswith("KeyError") and figures["slow"]["note"].startswith("TimeoutError")
    assert figures["slow"]["call_us"] is None and figures["second"]["back_to_back_us"] > 0
    assert dict(case.in_turn(("first", "second"), True, 60, budget=0)) == {}
    called.clear()

    monkeypatch.setattr(measure, "LARGE", 0)
    assert set(dict(case.in_turn(("first", "second"), True, 60))) == {"first", "second"}
    assert [name for name, _ in itertools.groupby(called)] == ["first", "second"]


def test_contenders_of_a_case_keep_what_they_compiled():
    def one(x):
        return x

    def other(x):
        return -x

    first = registry._compile(one, "case")
    assert registry._compile(other, "case") is not first and registry._compile(one, "case") is first
    registry._compile(other, "another")
    assert registry._compile(one, "case") is not first


PLUGIN = """
import torch
from benchmarks import registry

def loop(row, d):
    value, reward, done = (registry.flat(d)[name] for name in ("state_value", "reward", "done"))
    reward, done = registry._before(reward), registry._before(done).float()

    def call(_):
        advantage = torch.zeros_like(value)
        for t in range(value.shape[1] - 2, -1, -1):
            goes_on = 1 - done[:, t + 1]
            delta = reward[:, t + 1] + registry.GAMMA * goes_on * value[:, t + 1] - value[:, t]
            advantage[:, t] = delta + registry.GAMMA * registry.LMBDA * goes_on * advantage[:, t + 1]
        return advantage, advantage + value

    return call, lambda: None

CONTENDERS = {"pufferlib5": loop}
"""


def test_a_plugin_adds_a_contender(tmp_path, monkeypatch):
    """One that defines GAE as PufferLib does: rewards and flags a step later, nothing behind the window."""
    monkeypatch.setattr(registry, "CONTENDERS", dict(registry.CONTENDERS))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    registry.load_plugin(str(tmp_path / "plugin.py"))
    case = measure.Case(registry.ROWS["gae_bootstrap"], Shape(3, 17), "cpu")
    figures = case.measure("pufferlib5", True, 10)
    assert figures["note"] is None and figures["error"] < 1e-5 and figures["call_us"] > 0


def test_bytes_are_those_of_the_declaration():
    row = registry.ROWS["gae"]
    assert registry.bytes_moved(row, registry.entries(row, 3, 5)) == 3 * 5 * 22
    assert registry.bytes_moved(row, registry.entries(row, 3, 5, dtype=torch.bfloat16)) == 3 * 5 * 12


def test_rl_tritons_retrace_is_handed_what_ours_is():
    """One policy for both states, the taken action's value picked before: the same memory, counted once."""
    row, handed = registry.ROWS["retrace_taken"], []
    d = registry.entries(row, 3, 5)
    assert registry.bytes_moved(row, d) == 3 * 5 * (16 + 4 + 16 + 8 + 4 + 4 + 1 + 1 + 8)
    given = row.arguments(d)
    assert given["next_pi"] is given["pi"] is d["pi"] and given["action_values"] is d["action_value"]
    peer = SimpleNamespace(compute_retrace=lambda *args: handed.extend(args) or (None, None))
    row.rl_triton(peer, registry.flat(d))()
    ours = {x.data_ptr() for x in given.values() if isinstance(x, torch.Tensor)}
    pi, mu, *same, terminated, truncated, _, _ = handed
    assert {pi.data_ptr(), *(x.data_ptr() for x in same)} <= ours and len(same) == 4
    torch.testing.assert_close(mu, d["log_mu"][..., 0].exp())
    torch.testing.assert_close(terminated + truncated, d["done"][..., 0].float())


def test_suites_name_what_exists():
    for suite in SUITES.values():
        assert set(suite.estimators) <= set(registry.ROWS) and set(suite.contenders) <= set(registry.CONTENDERS)
    assert "retrace_taken" in SUITES["peers"].estimators
    assert "retrace_from_action_values" not in SUITES["peers"].estimators
    assert {"retrace_taken", "retrace_from_action_values"} <= set(SUITES["large"].estimators)
    assert len(SUITES["paper"].shapes) == 12 and len(SUITES["peers"].shapes) == 16
    assert len(SUITES["parallel"].shapes) == len(SUITES["classic"].shapes) == 20


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "quick", SUITES["quick"].__class__((Shape(2, 8), Shape(2, 130))))
    out, readme = tmp_path / "run.json", tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    chosen = ["--estimators", "gae", "prefix_sum", "--contenders", "ours", "module", "torchrl_vec"]
    cli.main(["run", "--device", "cpu", "--quick", "--out", str(out), *chosen])
    result = json.loads(out.read_text())
    assert result["complete"] and len(result["rows"]) == 12
    assert result["environment"]["torch"] and result["environment"]["commit"] != ""
    timed = [row for row in result["rows"] if row["call_us"]]
    assert len(timed) == 10 and all(row["back_to_back_us"] > 0 and row["error"] < 1e-4 for row in timed)

    capsys.readouterr()
    cli.main(["table", str(out), "--update", str(readme)])
    text = capsys.readouterr().out
    assert text.startswith("| estimator |") and "| gae (cpu) |" in text
    lines = readme.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines and text.splitlines()[0] in lines
    cli.main(["table", str(out), "--detail"])
    assert "2×130" in capsys.readouterr().out

    cli.main(["plot", str(out), "--out", str(tmp_path / "plots")])
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"speedup.png", "calls.png"}


def test_budget_stops_cleanly(tmp_path):
    out = tmp_path / "run.json"
    cli.main(["run", "--device", "cpu", "--budget", "0", "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == []


def test_figures_of_a_gpu_are_drawn_and_tabled(tmp_path):
    from benchmarks.plot import plots

    row = {"suite": "large", "estimator": "gae_bootstrap", "N": 4096, "T": 128, "layout": "rows", "dtype": "float32",
           "device": "cuda", "bytes": 2e8, "copy_us": 50.0, "contender": "ours", "device_us": 55.0, "call_us": 60.0,
           "back_to_back_us": 56.0, "peak_extra_bytes": 0, "error": 0.0, "note": None}  # fmt: skip
    rows = [row, {**row, "contender": "rl_triton", "device_us": 110.0}]
    assert "| 1.1 |" in report.summary(rows) and "| 2 |" in report.summary(rows)
    peers = {"rl_triton_0_1_3": [{"algo": "gae", "B": 4096, "T": 128, "device_us": 165.0}]}
    assert "| 3 |" in report.summary(rows[:1], peers)
    assert [path.name for path in plots(rows, tmp_path)] == ["ceiling.png", "calls.png"]


@pytest.mark.gpu_perf
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [Shape(64, 256), Shape(65536, 64), Shape(256, 128, "time")], ids=str)
def test_figures_on_a_gpu(shape):
    case = measure.Case(registry.ROWS["gae"], shape, "cuda")
    for name in ("ours", "ours_out", "module", "module_out"):
        figures = case.measure(name, True, 60)
        assert figures["note"] is None and figures["peak_extra_bytes"] == 0
        assert 0 < figures["device_us"] < figures["call_us"]
    assert case.measure("torchrl_vec", True, 60)["device_us"] is None  # it synchronises
    again = case.measure("ours", True, 60)  # which does not spoil what follows
    assert again["device_us"] > 0 and measure.copy_us(case.bytes, case.device) > 0


def test_value_networks(tmp_path, monkeypatch, capsys):
    """Tiny shapes: every contender is right and timed; one that fails, or is wrong, is noted and the rest goes on."""
    from benchmarks import networks

    def broken(net, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def wrong(net, device):
        return networks.rtd.GAE(gamma=0.5, lmbda=0.5, value_network=net)

    monkeypatch.setattr(networks, "CONTENDERS", {**networks.CONTENDERS, "broken": broken, "wrong": wrong})
    monkeypatch.delitem(networks.UPDATERS, "torchrl_compiled")  # minutes on a CPU
    out = tmp_path / "networks.json"
    cli.main(["networks", "--json", str(out), "--tiny", "--device", "cpu"])
    result = json.loads(out.read_text())
    assert result["complete"] and result["environment"]["torch"] and "| cnn |" in capsys.readouterr().out
    noted = {row["contender"]: row["note"] for row in result["rows"] if row["note"]}
    assert set(noted) == {"broken", "wrong"}
    assert noted["broken"].startswith("OutOfMemoryError") and noted["wrong"].startswith("Wrong")
    timed = [row for row in result["rows"] if not row["note"]]
    assert len(timed) == 2 * 6 + 2 and all(row["ms"] > 0 for row in timed)
    assert all(0 < row["share"] < 1 for row in timed if row["part"] == "update")
    cli.main(["plot", str(out), "--out", str(tmp_path)])
    assert (tmp_path / "networks.png").exists()
