"""The kernel under tile plans that small inputs would not choose: several rows or chunks a program, segments."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
import rl_triton_td.functional as F
from conftest import INTERPRET, agree, rollout
from rl_triton_td import _launch
from rl_triton_td._launch import Tile, force_tile, tile_plan

SIDE_BY_SIDE = Tile(4, 128, 1), Tile(16, 32, 1, 100)
TILES = [
    pytest.param(Tile(1, 16, 1), id="one row, chunks in turn"),
    pytest.param(Tile(4, 16, 1), id="rows together, chunks in turn"),
    pytest.param(Tile(2, 32, 1, 3), id="segments side by side"),
    pytest.param(Tile(1, 16, 1, 100), id="a segment for every chunk"),
    pytest.param(Tile(8, 256, 4), id="all at once"),
    pytest.param(SIDE_BY_SIDE[0], id="steps in a row to a thread"),
    pytest.param(SIDE_BY_SIDE[1], id="steps in a row to a thread, a segment for every chunk"),
]
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 130)]
TALL = [pytest.param(4, 1000, marks=pytest.mark.large), pytest.param(2, 5000, marks=pytest.mark.large)]


@pytest.fixture
def tiles(device):
    if device == "cpu" and not INTERPRET:
        pytest.skip("the CPU path has no tiles")


needs_tiles = pytest.mark.usefixtures("tiles")


def run(name, x, time_major, device):
    lay = (lambda y: y.t().contiguous().to(device)) if time_major else (lambda y: y.to(device))
    x = {k: lay(v) if v.ndim == 2 else v.to(device) for k, v in x.items()}
    time_dim = 0 if time_major else 1
    values = (x["state_value"], x["next_state_value"], x["reward"], x["done"], x["terminated"])
    results = {
        "gae": lambda: F.generalized_advantage_estimate(0.99, 0.95, *values, time_dim=time_dim),
        "gae_two_lambdas": lambda: F.generalized_advantage_estimate(
            0.99, 0.95, *values, lmbda_critic=0.7, time_dim=time_dim
        ),
        "gae_bootstrap": lambda: F.generalized_advantage_estimate(
            0.99, 0.95, values[0], None, *values[2:], bootstrap=x["bootstrap"], time_dim=time_dim
        ),
        "gae_behind": lambda: F.generalized_advantage_estimate(
            0.99, 0.95, values[0], None, values[2], values[4], values[4], bootstrap=x["initial"], time_dim=time_dim
        ),
        "gae_behind_masked": lambda: F.generalized_advantage_estimate(
            0.99,
            0.95,
            values[0],
            None,
            values[2],
            values[4],
            values[4],
            bootstrap=x["initial"],
            mask=x["mask"],
            time_dim=time_dim,
        ),
        "gae_masked": lambda: F.generalized_advantage_estimate(0.99, 0.95, *values, mask=x["mask"], time_dim=time_dim),
        "gae_bootstrap_masked": lambda: F.generalized_advantage_estimate(
            0.99, 0.95, values[0], None, *values[2:], bootstrap=x["bootstrap"], mask=x["mask"], time_dim=time_dim
        ),
        "vtrace": lambda: F.vtrace_advantage_estimate(0.99, x["log_pi"], x["log_mu"], *values, time_dim=time_dim),
        "retrace": lambda: F.retrace_lambda_advantage_estimate(
            0.99, 0.9, x["log_pi"], x["log_mu"], *values, time_dim=time_dim
        ),
        "trace": lambda: (
            F.eligibility_trace(0.99, 0.9, x["reward"], x["done"], initial=x["initial"], time_dim=time_dim),
        ),
        "recurrence": lambda: (
            F.linear_recurrence(
                x["reward"], x["gammas"].to(x["reward"]), initial=x["initial"], reverse=True, time_dim=time_dim
            ),
        ),
    }[name]()
    return tuple(r.t() if time_major else r for r in results)


def expected(name, x):
    values = (x["state_value"], x["next_state_value"], x["reward"], x["done"], x["terminated"])
    return {
        "gae": lambda: reference.gae(0.99, 0.95, *values),
        "gae_two_lambdas": lambda: reference.gae(0.99, 0.95, *values, lmbda_critic=0.7),
        "gae_bootstrap": lambda: reference.gae(0.99, 0.95, values[0], None, *values[2:], bootstrap=x["bootstrap"]),
        "gae_behind": lambda: reference.gae(
            0.99, 0.95, values[0], None, values[2], values[4], values[4], bootstrap=x["initial"]
        ),
        "gae_behind_masked": lambda: reference.gae(
            0.99, 0.95, values[0], None, values[2], values[4], values[4], bootstrap=x["initial"], mask=x["mask"]
        ),
        "gae_masked": lambda: reference.gae(0.99, 0.95, *values, mask=x["mask"]),
        "gae_bootstrap_masked": lambda: reference.gae(
            0.99, 0.95, values[0], None, *values[2:], bootstrap=x["bootstrap"], mask=x["mask"]
        ),
        "vtrace": lambda: reference.vtrace(0.99, x["log_pi"], x["log_mu"], *values),
        "retrace": lambda: reference.retrace(0.99, 0.9, x["log_pi"], x["log_mu"], *values),
        "trace": lambda: (reference.eligibility_trace(0.99, 0.9, x["reward"], x["done"], initial=x["initial"]),),
        "recurrence": lambda: (
            reference.linear_recurrence(x["reward"], x["gammas"], initial=x["initial"], reverse=True),
        ),
    }[name]()


NAMES = [
    "gae", "gae_two_lambdas", "gae_bootstrap", "gae_behind", "gae_masked", "gae_bootstrap_masked", "gae_behind_masked",
    "vtrace", "retrace", "trace", "recurrence",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("time_major", [False, True], ids=["rows", "time-major"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("N,T", [*SHAPES, *TALL])
@needs_tiles
def test_every_tile_gives_the_same_numbers(name, tile, N, T, time_major, device):
    if INTERPRET and (N, T) not in ((3, 7), (2, 130)):
        pytest.skip("two shapes are enough for the interpreter")
    if INTERPRET and tile in SIDE_BY_SIDE and not (time_major and T > 7):
        pytest.skip("only rows side by side have steps in a row to a thread")
    x = rollout(N, T, seed=1, dtype=torch.float32)
    with force_tile(tile):
        actual = run(name, x, time_major, device)
    for a, e in zip(actual, expected(name, x), strict=True):
        agree(a, e, 2e-5, 2e-5, name)


@pytest.mark.parametrize("name", ["gae_bootstrap", "gae_bootstrap_masked", "vtrace", "retrace", "trace", "recurrence"])
@pytest.mark.parametrize(
    "T, tile, skew",
    [
        pytest.param(100, Tile(1, 64, 1), 32, id="from a sector"),
        pytest.param(100, Tile(2, 32, 1, 100), 32, id="from a sector, a segment for every chunk"),
        pytest.param(101, Tile(2, 32, 1), 4, id="from a group"),
        pytest.param(101, Tile(1, 32, 1, 100), 4, id="from a group, a segment for every chunk"),
        pytest.param(63, Tile(4, 64, 1), 32, id="an odd length from a sector"),
        pytest.param(61, Tile(4, 64, 1), 4, id="an odd length in one piece"),
        pytest.param(62, Tile(4, 64, 1), 4, id="an even length in one piece"),
    ],
)
@needs_tiles
def test_rows_that_start_anywhere_in_memory(name, T, tile, skew, device):
    """Chunks begin where memory is read best, so that one may hold the end of a row and what lies beside it."""
    _launch._launches.clear()
    x = rollout(5, T, seed=6, dtype=torch.float32)
    beside = [i for i in range(5) if i != 2]
    with force_tile(tile):
        actual = run(name, x, False, device)
        spoilt = {k: v.index_fill(0, torch.tensor(2), torch.nan) if v.is_floating_point() else v for k, v in x.items()}
        others = run(name, spoilt, False, device)
    assert {plan.skew for plan in _launch._launches.values()} == {skew}
    for a, b, e in zip(actual, others, expected(name, x), strict=True):
        agree(a, e, 2e-5, 2e-5, name)
        agree(b[beside], e[beside], 2e-5, 2e-5, f"{name} beside NaN")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "N, T, tile",
    [
        pytest.param(9, 62, Tile(1, 128, 1, strung=2), id="pairs, of which one has half"),
        pytest.param(8, 31, Tile(2, 128, 2, strung=4), id="fours in one chunk"),
        pytest.param(7, 61, Tile(1, 64, 1, strung=4), id="chunks in turn, an odd number of steps"),
        pytest.param(6, 62, Tile(1, 32, 1, 100, strung=2), id="a segment for every chunk"),
        pytest.param(30, 5, Tile(2, 64, 1, strung=12), id="shorter than two fours"),
        pytest.param(40, 4, Tile(1, 64, 1, strung=9), id="as long as a four"),
    ],
)
@needs_tiles
def test_rows_strung_together(name, N, T, tile, device):
    """Several rows are taken as one, and nothing passes from one to the next."""
    _launch._launches.clear()
    x = rollout(N, T, seed=6, dtype=torch.float32)
    one = N // 2
    beside = [i for i in range(N) if i != one]
    with force_tile(tile):
        actual = run(name, x, False, device)
        spoilt = {
            k: v.index_fill(0, torch.tensor(one), torch.nan) if v.is_floating_point() else v for k, v in x.items()
        }
        others = run(name, spoilt, False, device)
    assert {plan.strung for plan in _launch._launches.values()} == {1 if "masked" in name else tile.strung}
    for a, b, e in zip(actual, others, expected(name, x), strict=True):
        agree(a, e, 2e-5, 2e-5, name)
        agree(b[beside], e[beside], 2e-5, 2e-5, f"{name} beside NaN")


@pytest.mark.parametrize("reverse", [False, True])
@needs_tiles
def test_each_of_rows_strung_together_has_its_own_initial(reverse, device):
    g = torch.Generator().manual_seed(0)
    alpha, beta = (torch.randn(6, 31, 1, generator=g) for _ in range(2))
    initial = torch.randn(6, 1, generator=g)
    wanted = reference.linear_recurrence(alpha[..., 0], beta[..., 0], initial=initial[:, 0], reverse=reverse)
    alpha, beta, initial = (x.to(device) for x in (alpha, beta, initial))
    with force_tile(Tile(1, 64, 1, strung=4)):
        x = F.linear_recurrence(alpha, beta, initial=initial, reverse=reverse)
    agree(x[..., 0], wanted, 2e-5, 2e-5, "recurrence")


@pytest.mark.parametrize("strung", [1, 4, 12])
@needs_tiles
def test_gradients_of_rows_strung_together(strung, device):
    """The backward pass runs forward, and reads what lies behind each row's last step."""
    x = rollout(12, 5, seed=1, dtype=torch.float32)
    gammas, behind = x["gammas"].double().requires_grad_(), x["initial"].double().requires_grad_()
    following, returns = behind, []
    for t in reversed(range(5)):
        following = x["reward"][:, t] + gammas[:, t] * torch.where(x["terminated"][:, t], 0, following)
        returns.append(following)
    weights = torch.arange(60.0).view(12, 5)
    wanted = torch.autograd.grad((torch.stack(returns[::-1], 1) * weights).sum(), (gammas, behind))
    leaves = [y.detach().float().to(device).requires_grad_() for y in (gammas, behind)]
    with force_tile(Tile(1, 64, 1, strung=strung)):
        actual = F.reward2go(
            x["reward"].to(device), x["terminated"].to(device), leaves[0], bootstrap=leaves[1], time_dim=1
        )
        got = torch.autograd.grad((actual * weights.to(device)).sum(), leaves)
    for a, e in zip(got, wanted, strict=True):
        agree(a, e, 2e-5, 2e-5, "gradient")


@given(rows=st.integers(1, 10**6), steps=st.integers(1, 3000), step_bytes=st.integers(9, 60))
def test_rows_are_strung_together_where_a_tile_of_them_suits_memory(rows, steps, step_bytes):
    strung = _launch._strung(rows, steps, step_bytes)
    assert 1 <= strung <= rows
    if strung > 1:
        room = 1 << (strung * steps - 1).bit_length()
        assert strung * steps % 4 == 0 and steps >= 4 and 0.85 * room < strung * steps <= room <= 2048
    if steps & (steps - 1) == 0 or steps > 1024:
        assert strung == 1


@pytest.mark.parametrize(
    "rows, steps, step_bytes, strung",
    [
        (65536, 255, 21, 4), (65536, 255, 9, 4), (131072, 127, 21, 4), (2**20, 15, 21, 68), (2**20, 5, 21, 204),
        (32768, 511, 21, 4), (65536, 250, 21, 2), (65536, 300, 21, 3), (65536, 300, 9, 1), (65536, 256, 21, 1),
        (16384, 1000, 21, 1), (16384, 1001, 21, 1), (3, 255, 21, 1), (2**20, 3, 21, 1),
    ],
)  # fmt: skip
def test_which_rows_are_strung_together(rows, steps, step_bytes, strung):
    assert _launch._strung(rows, steps, step_bytes) == strung


@pytest.mark.parametrize("n", [3, 4, 5, 7, 8, 255, 1000, 1001, 2**16 + 1, 2**24 - 1, 2**29 + 1])
def test_a_multiplication_divides(n):
    multiplier, shift = _launch._divisor(n)
    assert 0 < multiplier < 2**31 and shift >= 0
    for x in (0, 1, n - 1, n, n + 1, 2**30 // n * n - 1, 2**30 // n * n, 2**30 - 1):
        assert x >= 2**30 or (x * multiplier >> 32) >> shift == x // n


@needs_tiles
def test_odd_rows_at_any_address(device):
    """Of entries that begin between two places where a thread may read four numbers at once."""
    x = rollout(5, 61, seed=7, dtype=torch.float32)
    for entry, strung in itertools.product(("reward", "state_value", "done"), (1, 4)):
        with force_tile(Tile(4, 64, 1, strung=strung)):
            _launch._launches.clear()
            moved = {k: v.to(device) for k, v in x.items()}
            moved[entry] = torch.zeros(5 * 61 + 1, dtype=x[entry].dtype, device=device)[1:].view(5, 61).copy_(x[entry])
            for a, e in zip(run("vtrace", moved, False, device), expected("vtrace", x), strict=True):
                agree(a, e, 2e-5, 2e-5, entry)
            (plan,) = _launch._launches.values()
            assert plan.skew == 0 and plan.strung == 1, entry


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_a_long_row_is_spread_over_the_device(name):
    x = rollout(1, 300_000, seed=2, dtype=torch.float32)
    for a, e in zip(run(name, x, False, "cuda"), expected(name, x), strict=True):
        agree(a, e, 2e-5, 2e-5, name)


def test_rows_of_many_strided_dimensions(device):
    """More row dimensions than the kernel indexes, none of which merge."""
    x = rollout(2 * 3 * 2 * 2, 9, seed=3, dtype=torch.float32)
    wanted = reference.gae(0.99, 0.95, *(x[k] for k in VALUES))

    def spread(y):
        wide = y.view(2, 3, 2, 2, 9).repeat_interleave(2, 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
        return wide.to(device)[:, ::2, ::2, ::2]

    gamma = torch.tensor(0.99, device=device)
    actual = F.generalized_advantage_estimate(gamma, 0.95, *(spread(x[k]) for k in VALUES), time_dim=-1)
    for a, e in zip(actual, wanted, strict=True):
        agree(a.reshape(24, 9), e, 2e-5, 2e-5, "sliced rows")


@pytest.mark.parametrize("layout", ["every other", "expanded", "two dimensions"])
def test_initial_values_in_any_layout(layout, device):
    x = rollout(6, 9, seed=5, dtype=torch.float32)
    reward, done = (x[k].to(device) for k in ("reward", "done"))
    initial = torch.arange(6.0, device=device).repeat_interleave(2)[::2]
    if layout == "expanded":
        initial = initial[:1].expand(6)
    shape = (2, 3) if layout == "two dimensions" else (6,)
    actual = F.episodic_prefix_sum(
        reward.reshape(*shape, 9), done.reshape(*shape, 9), initial=initial.unflatten(0, shape), time_dim=-1
    )
    wanted = reference.episodic_prefix_sum(x["reward"], x["done"], initial=initial.cpu())
    agree(actual.reshape(6, 9), wanted, 1e-5, 1e-5, layout)


VALUES = ("state_value", "next_state_value", "reward", "done", "terminated")


def test_writing_over_an_input_that_neighbours_read(device):
    """`out` may lie exactly on an input, although a step reads its successor's value there."""
    x = {k: v.to(device) for k, v in rollout(3, 40, seed=4, dtype=torch.float32).items()}
    logs = (x["log_pi"], x["log_mu"])
    wanted = F.vtrace_advantage_estimate(0.99, *logs, *(x[k] for k in VALUES), time_dim=1)
    value = x["state_value"].clone()
    F.vtrace_advantage_estimate(
        0.99, *logs, value, *(x[k] for k in VALUES[1:]), time_dim=1, out=(torch.empty_like(value), value)
    )
    assert torch.equal(value, wanted[1])


def test_segments_meet_in_every_launch(device):
    """Words of the launch before are not taken for this one's, also where the count of launches starts again."""
    if device == "cpu" and not INTERPRET:
        pytest.skip("no kernel runs")
    _launch._launches.clear()
    with force_tile(Tile(1, 16, 1, 100)):
        for launches in (0, 2**31 - 1):
            for plan in _launch._launches.values():
                for words in plan.meetings.by_stream.values():
                    words.copy_((words & 0xFFFFFFFF) | launches << 32)
            for seed in range(2):
                x = rollout(2, 60, seed=seed, dtype=torch.float32)
                got = run("vtrace", x, False, device)
                for a, b in zip(got, expected("vtrace", x), strict=True):
                    agree(a, b, 1e-5, 1e-5, f"{launches} launches, {seed}")
    (plan,) = _launch._launches.values()
    assert plan.alone and plan.segments == 4 and [len(w) for w in plan.meetings.by_stream.values()] == [2 * 2 * 4]


def test_some_tiles_have_steps_in_a_row_for_a_thread():
    assert [Tile(*shape).run for shape in ((4, 128, 1), (16, 32, 1), (32, 64, 4), (32, 64, 8))] == [4, 4, 4, 2]
    assert [Tile(*shape).run for shape in ((64, 4, 1), (64, 2, 1), (1, 4096, 8), (128, 8, 1))] == [1, 1, 16, 1]


@pytest.mark.parametrize("time_contiguous", [True, False])
def test_the_plan_covers_every_shape(time_contiguous):
    for rows, steps in itertools.product((1, 2, 33, 4096, 10**7), (1, 5, 128, 1000, 16384, 10**6)):
        tile = tile_plan(rows, steps, time_contiguous)
        elements = tile.block_n * tile.block_t
        assert elements & (elements - 1) == 0 and elements <= 4096, (rows, steps, tile)
        assert tile.num_warps * 32 <= max(32, elements), (rows, steps, tile)
        assert 1 <= tile.segments <= -(-steps // tile.block_t), (rows, steps, tile)
