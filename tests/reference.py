"""Reference estimators: float64, one row and one time step at a time, in plain Python.

Written from the papers; shares no code with the package. Every function takes `[N, T]` tensors (row-wise scalars and
`[N]` continuation values where noted) under the argument names of the package and returns float64 tensors.

A masked row is compacted to its valid steps, solved without any notion of a mask, and scattered back with zeros.
Flags choose between two Python expressions; nothing is ever multiplied by a flag, so `NaN` goes only where it belongs.
`done[t]` ends the episode AT t. `V'_t` is the value of the state that transition t reached.
"""

import itertools
import math

import torch

INF = math.inf


# ---------------------------------------------------------------------------------------------------- rows and masks
def _solve(row, like, outputs, mask=None, flags=None, **entries):
    """Apply `row` to each row of the entries, cut down to the valid steps; put the results back among zeros."""
    N, T = like.shape
    steps = {name: _as_rows(value, N, T, bool) for name, value in (flags or {}).items()}
    steps |= {name: _as_rows(value, N, T, float) for name, value in entries.items()}
    valid = _as_rows(mask, N, T, bool)
    results = [[] for _ in range(outputs)]
    for n in range(N):
        keep = [t for t in range(T) if valid is None or valid[n][t]]
        solved = row(**{name: None if v is None else [v[n][t] for t in keep] for name, v in steps.items()})
        for result, values in zip(results, solved, strict=True):
            full = [0.0] * T
            for t, x in zip(keep, values, strict=True):
                full[t] = x
            result.append(full)
    return tuple(torch.tensor(result, dtype=torch.float64).reshape(N, T) for result in results)


def _as_rows(value, N, T, kind):
    if value is None:
        return None
    value = torch.as_tensor(value) != 0 if kind is bool else torch.as_tensor(value, dtype=torch.float64)
    return value.expand(N, T).tolist()


def _episode_flags(done, terminated):
    """Terminated implies done; a missing `terminated` means that every end is terminal, a missing `done` no other."""
    if done is None:
        done = terminated
    if terminated is None:
        terminated = done
    terminated = torch.as_tensor(terminated) != 0
    return {"done": (torch.as_tensor(done) != 0) | terminated, "term": terminated}


def _continuation(bootstrap):
    """A bootstrap of shape `[N]` stands behind the last valid step alone, one of shape `[N, T]` at every step."""
    if bootstrap is None:
        return None, False
    bootstrap = torch.as_tensor(bootstrap)
    return (bootstrap[:, None], False) if bootstrap.ndim == 1 else (bootstrap, True)


def successor(next_value, value, done, term, bootstrap, per_step):
    """V'_t of one compacted row: the dense entry, else b_t where truncated or last, else V of the next step."""
    if next_value is not None:
        return next_value
    last, out = len(done) - 1, []
    for t in range(len(done)):
        if term[t]:
            out.append(math.nan)  # nobody may look
        elif t == last:
            out.append(0.0 if bootstrap is None else bootstrap[t])
        elif done[t]:
            if bootstrap is None or not per_step:
                raise ValueError("a truncated step inside the window needs a per-step bootstrap")
            out.append(bootstrap[t])
        else:
            out.append(value[t + 1])
    return out


# ------------------------------------------------------------------------------------------------------ small helpers
def _decayed(decay, x):
    """decay * x, where a decay of exactly 0 means that x does not matter."""
    return 0.0 if decay == 0 else decay * x


def _discounted(term, gamma, x):
    """gamma * (1 - term) * x, selected."""
    return 0.0 if term else gamma * x


def _ratio(log_pi, log_mu):
    try:
        return math.exp(log_pi - log_mu)
    except OverflowError:
        return INF


def _clip(x, upper):
    return x if math.isnan(x) else min(x, upper)


# --------------------------------------------------------------------------------------------------------- estimators
def gae(
    gamma,
    lmbda,
    state_value,
    next_state_value,
    reward,
    done,
    terminated=None,
    *,
    bootstrap=None,
    mask=None,
    lmbda_critic=None,
):
    """A_t = delta_t + gamma lmbda A_{t+1}, delta_t = r_t + gamma V'_t - V_t. Schulman et al. 2015 (GAE), eq. 16."""
    b, per_step = _continuation(bootstrap)

    def row(r, v, nv, b, done, term, gamma, lmbda):
        nv = successor(nv, v, done, term, b, per_step)
        out, x = [0.0] * len(r), 0.0
        for t in reversed(range(len(r))):
            delta = r[t] + _discounted(term[t], gamma[t], nv[t]) - v[t]
            x = delta if done[t] else delta + _decayed(gamma[t] * lmbda[t], x)
            out[t] = x
        return out, [a + value for a, value in zip(out, v, strict=True)]

    entries = {"r": reward, "v": state_value, "nv": next_state_value, "b": b, "gamma": gamma}
    flags = _episode_flags(done, terminated)
    advantage, target = _solve(row, reward, 2, mask, flags, lmbda=lmbda, **entries)
    if lmbda_critic is not None:
        target = _solve(row, reward, 2, mask, flags, lmbda=lmbda_critic, **entries)[1]
    return advantage, target


def gae_backward(gamma, lmbda, done, terminated, grad_advantage, grad_value_target):
    """Gradients of V_t, V'_t and r_t: with g_t = grad A_t + grad target_t, a_t = g_t + gamma lmbda a_{t-1} is that of
    delta_t, which a reward adds to, a value takes from (and adds to the target), a next value adds to discounted."""

    def row(advantage, target, done, term):
        carry, grads = 0.0, ([], [], [])
        for t, g in enumerate(target):
            carry = advantage[t] + g + carry
            for grad, x in zip(grads, (g - carry, 0.0 if term[t] else gamma * carry, carry), strict=True):
                grad.append(x)
            carry = 0.0 if done[t] else gamma * lmbda * carry
        return grads

    entries = {"advantage": grad_advantage, "target": grad_value_target}
    return _solve(row, grad_advantage, 3, None, _episode_flags(done, terminated), **entries)


def td0_return(
    gamma, next_state_value, reward, terminated=None, *, done=None, state_value=None, bootstrap=None, mask=None
):
    """y_t = r_t + gamma V'_t: the one-step target. Sutton & Barto 2018, eq. 6.2."""
    b, per_step = _continuation(bootstrap)
    if done is None and terminated is None:
        terminated = torch.zeros_like(reward, dtype=torch.bool)

    def row(r, v, nv, b, done, term, gamma):
        nv = successor(nv, v, done, term, b, per_step)
        return ([r[t] + _discounted(term[t], gamma[t], nv[t]) for t in range(len(r))],)

    entries = {"r": reward, "v": state_value, "nv": next_state_value, "b": b, "gamma": gamma}
    return _solve(row, reward, 1, mask, _episode_flags(done, terminated), **entries)[0]


def td0_advantage(gamma, state_value, next_state_value, reward, done, terminated=None, *, bootstrap=None, mask=None):
    """The one-step TD error. Sutton & Barto 2018, eq. 6.5."""
    target = td0_return(
        gamma,
        next_state_value,
        reward,
        done if terminated is None else terminated,
        done=done,
        state_value=state_value,
        bootstrap=bootstrap,
        mask=mask,
    )
    return _minus(target, state_value, mask)


def td_lambda_return(
    gamma,
    lmbda,
    next_state_value,
    reward,
    done,
    terminated=None,
    rolling_gamma=None,
    *,
    state_value=None,
    bootstrap=None,
    mask=None,
):
    """G_t = r_t + gamma ((1 - lmbda) V'_t + lmbda G_{t+1}). Sutton & Barto 2018, eqs. 12.2-12.3, recursive form 12.18.

    With `rolling_gamma=False` the gamma and lmbda of the start step hold for the whole return that starts there.
    """
    b, per_step = _continuation(bootstrap)

    def one_return(start, gamma_at, lmbda_at, r, nv, done, term, out):
        """Run back from the window's end to `start`; leave every intermediate return in `out`."""
        x = None
        for t in reversed(range(start, len(r))):
            gamma, lmbda = gamma_at(t), lmbda_at(t)
            if done[t] or x is None:
                mixed = nv[t]
            else:
                mixed = _decayed(1 - lmbda, nv[t]) + _decayed(lmbda, x)
            x = r[t] if term[t] else r[t] + _decayed(gamma, mixed)
            out[t] = x
        return x

    def row(r, v, nv, b, done, term, gamma, lmbda):
        nv = successor(nv, v, done, term, b, per_step)
        out = [0.0] * len(r)
        if rolling_gamma is None or rolling_gamma:
            one_return(0, gamma.__getitem__, lmbda.__getitem__, r, nv, done, term, out)
            return (out,)
        scratch = [0.0] * len(r)
        for k in range(len(r)):
            out[k] = one_return(k, lambda t: gamma[k], lambda t: lmbda[k], r, nv, done, term, scratch)  # noqa: B023
        return (out,)

    entries = {"r": reward, "v": state_value, "nv": next_state_value, "b": b, "gamma": gamma, "lmbda": lmbda}
    return _solve(row, reward, 1, mask, _episode_flags(done, terminated), **entries)[0]


def td_lambda_advantage(
    gamma, lmbda, state_value, next_state_value, reward, done, terminated=None, rolling_gamma=None, **kwargs
):
    """G^lambda_t - V_t. Sutton & Barto 2018, eq. 12.4."""
    target = td_lambda_return(
        gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma, state_value=state_value, **kwargs
    )
    return _minus(target, state_value, kwargs.get("mask"))


def td1_return(gamma, next_state_value, reward, done, terminated=None, rolling_gamma=None, **kwargs):
    """G_t = r_t + gamma G_{t+1}, bootstrapped where the data end. Sutton & Barto 2018, eq. 12.1 up to the horizon."""
    return td_lambda_return(gamma, 1.0, next_state_value, reward, done, terminated, rolling_gamma, **kwargs)


def td1_advantage(gamma, state_value, next_state_value, reward, done, terminated=None, rolling_gamma=None, **kwargs):
    """TD(1) return less V_t."""
    return td_lambda_advantage(
        gamma, 1.0, state_value, next_state_value, reward, done, terminated, rolling_gamma, **kwargs
    )


def reward_to_go(reward, done, gamma, *, terminated=None, bootstrap=None, mask=None):
    """G_t = r_t + gamma G_{t+1}, b_t for G_{t+1} where a cut needs a value. Sutton & Barto 2018, eq. 3.9."""
    b, per_step = _continuation(bootstrap)

    def row(r, b, done, term, gamma):
        out, x, last = [0.0] * len(r), 0.0, len(r) - 1
        for t in reversed(range(len(r))):
            if term[t]:
                x = r[t]
            elif t == last or done[t]:
                if b is not None and not per_step and t < last:
                    raise ValueError("a truncated step inside the window needs a per-step bootstrap")
                x = r[t] if b is None else r[t] + _decayed(gamma[t], b[t])
            else:
                x = r[t] + _decayed(gamma[t], x)
            out[t] = x
        return (out,)

    return _solve(row, reward, 1, mask, _episode_flags(done, terminated), r=reward, b=b, gamma=gamma)[0]


def vtrace(
    gamma,
    log_pi,
    log_mu,
    state_value,
    next_state_value,
    reward,
    done,
    terminated=None,
    rho_thresh=1.0,
    c_thresh=1.0,
    *,
    lmbda=1.0,
    rho_pg_thresh=None,
    bootstrap=None,
    mask=None,
):
    """V-trace targets (Espeholt et al. 2018, sec. 4.1, eq. 1, with c_i of remark 2) and the advantage of sec. 4.2.

    v_t = V_t + rho_t (r_t + gamma V'_t - V_t) + gamma lmbda c_t (v_{t+1} - V_{t+1})
    A_t = rho_t (r_t + gamma v'_t - V_t), v'_t = v_{t+1} inside an episode and V'_t where one is cut
    """
    b, per_step = _continuation(bootstrap)
    if rho_pg_thresh is None:
        rho_pg_thresh = rho_thresh

    def row(r, v, nv, b, log_pi, log_mu, done, term, gamma, lmbda):
        nv = successor(nv, v, done, term, b, per_step)
        last = len(r) - 1
        advantage, target = [0.0] * len(r), [0.0] * len(r)
        for t in reversed(range(len(r))):
            ratio = _ratio(log_pi[t], log_mu[t])
            x = _clip(ratio, rho_thresh) * (r[t] + _discounted(term[t], gamma[t], nv[t]) - v[t])
            if done[t] or t == last:
                next_target = nv[t]
            else:
                next_target = target[t + 1]
                x += _decayed(gamma[t] * lmbda[t] * _clip(ratio, c_thresh), target[t + 1] - v[t + 1])
            target[t] = v[t] + x
            advantage[t] = _clip(ratio, rho_pg_thresh) * (r[t] + _discounted(term[t], gamma[t], next_target) - v[t])
        return advantage, target

    entries = {"r": reward, "v": state_value, "nv": next_state_value, "b": b, "log_pi": log_pi, "log_mu": log_mu}
    flags = _episode_flags(done, terminated)
    return _solve(row, reward, 2, mask, flags, gamma=gamma, lmbda=lmbda, **entries)


def retrace(
    gamma,
    lmbda,
    log_pi,
    log_mu,
    action_value,
    next_state_value,
    reward,
    done,
    terminated=None,
    *,
    c_thresh=1.0,
    rho_thresh=1.0,
    trace="retrace",
    mask=None,
):
    """Retrace(lambda): Munos et al. 2016, eqs. 3-4; the other traces are those of its table 1.

    Q_ret_t = Q_t + delta_t + gamma c_{t+1} (Q_ret_{t+1} - Q_{t+1}), delta_t = r_t + gamma E_pi Q(s'_t, .) - Q_t.
    """

    def coefficient(lmbda, log_pi, log_mu):
        if trace == "retrace":
            return lmbda * _clip(_ratio(log_pi, log_mu), c_thresh)
        if trace == "importance_sampling":
            return lmbda * _ratio(log_pi, log_mu)
        if trace == "tree_backup":
            return lmbda * math.exp(log_pi)
        if trace == "q_lambda":
            return lmbda
        raise ValueError(trace)

    def row(r, q, nv, log_pi, log_mu, done, term, gamma, lmbda):
        last = len(r) - 1
        advantage, target = [0.0] * len(r), [0.0] * len(r)
        for t in reversed(range(len(r))):
            x = r[t] + _discounted(term[t], gamma[t], nv[t]) - q[t]
            if done[t] or t == last:
                next_target = nv[t]
            else:
                next_target = target[t + 1]
                c = coefficient(lmbda[t + 1], log_pi and log_pi[t + 1], log_mu and log_mu[t + 1])
                x += _decayed(gamma[t] * c, target[t + 1] - q[t + 1])
            target[t] = q[t] + x
            rho = 1.0 if log_pi is None or log_mu is None else _clip(_ratio(log_pi[t], log_mu[t]), rho_thresh)
            advantage[t] = rho * (r[t] + _discounted(term[t], gamma[t], next_target) - q[t])
        return advantage, target

    entries = {"r": reward, "q": action_value, "nv": next_state_value, "log_pi": log_pi, "log_mu": log_mu}
    flags = _episode_flags(done, terminated)
    return _solve(row, reward, 2, mask, flags, gamma=gamma, lmbda=lmbda, **entries)


def retrace_from_action_values(
    gamma,
    lmbda,
    pi,
    next_pi,
    action_values,
    next_action_values,
    action,
    log_mu,
    reward,
    done,
    terminated=None,
    **kwargs,
):
    """Munos et al. 2016, eq. 4, the sum over actions written out; `[N, T, A]` entries hold one number an action.

    `action_values` may be of the taken action alone, `[N, T]` or `[N, T, 1]`.
    """
    N, T, A = pi.shape
    if action_values.ndim == 2:
        action_values = action_values[..., None]
    log_pi, q, expected = (torch.empty(N, T, dtype=torch.float64) for _ in range(3))
    for n, t in itertools.product(range(N), range(T)):
        a = int(action[n, t])
        p = float(pi[n, t, a])
        log_pi[n, t] = -INF if p == 0 else math.log(p)
        q[n, t] = float(action_values[n, t, a if action_values.shape[-1] > 1 else 0])
        expected[n, t] = math.fsum(float(next_pi[n, t, i]) * float(next_action_values[n, t, i]) for i in range(A))
    return retrace(gamma, lmbda, log_pi, log_mu, q, expected, reward, done, terminated, **kwargs)


def eligibility_trace(gamma, lmbda, gradient, done, *, ratio=None, initial=None, mask=None):
    """z_t = ratio_t (gamma lmbda z_{t-1} + g_t), cleared behind an end. Sutton & Barto 2018, eqs. 12.5 and 12.25.

    `gradient` is `[N, T, D]` and `initial` `[N, D]`; or `[N, T]` and `[N]`.
    """
    if gradient.ndim == 3:
        columns = [
            eligibility_trace(
                gamma,
                lmbda,
                gradient[..., d],
                done,
                ratio=ratio,
                initial=None if initial is None else initial[:, d],
                mask=mask,
            )
            for d in range(gradient.shape[-1])
        ]
        return torch.stack(columns, -1) if columns else torch.empty_like(gradient, dtype=torch.float64)

    def row(g, done, gamma, lmbda, ratio, initial):
        out, z = [], None
        for t in range(len(g)):
            if t == 0:
                z = 0.0 if initial is None else initial[0]
            elif done[t - 1]:
                z = 0.0
            z = _decayed(gamma[t] * lmbda[t], z) + g[t]
            if ratio is not None:
                z = ratio[t] * z
            out.append(z)
        return (out,)

    if done is None:
        done = torch.zeros_like(gradient, dtype=torch.bool)
    entries = {"g": gradient, "gamma": gamma, "lmbda": lmbda, "ratio": ratio}
    entries["initial"] = None if initial is None else initial[:, None]
    return _solve(row, gradient, 1, mask, {"done": done}, **entries)[0]


def episodic_prefix_sum(x, done, *, boundary="ends_at", initial=None, mask=None):
    """S_t = x_t + S_{t-1} inside an episode; the flag marks an episode's last step ("ends_at") or its first one."""

    def row(x, done, initial):
        out, total = [], None
        for t in range(len(x)):
            if t == 0:
                total = 0.0 if initial is None else initial[0]
            if done[t] if boundary == "starts_at" else t > 0 and done[t - 1]:
                total = 0.0
            total = total + x[t]
            out.append(total)
        return (out,)

    if done is None:
        done = torch.zeros_like(x, dtype=torch.bool)
    return _solve(row, x, 1, mask, {"done": done}, x=x, initial=None if initial is None else initial[:, None])[0]


def linear_recurrence(alpha, beta, *, initial=None, reverse=False, mask=None):
    """x_t = alpha_t + beta_t x_{t-1}, or x_{t+1} when reversed. Blelloch 1990, sec. 1.4."""

    def row(alpha, beta, initial):
        out = [0.0] * len(alpha)
        x = initial[0] if initial else 0.0
        for t in reversed(range(len(alpha))) if reverse else range(len(alpha)):
            x = alpha[t] + _decayed(beta[t], x)
            out[t] = x
        return (out,)

    initial = None if initial is None else initial[:, None]
    return _solve(row, alpha, 1, mask, alpha=alpha, beta=beta, initial=initial)[0]


def standardize(x, *, mask=None, groups=None, dim=None, eps=1e-4, correction=1):
    """(x - mean) / max(std, eps) over the valid entries that share a group and an index outside `dim`; two passes."""
    dims = set(range(x.ndim)) if dim is None else {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    if mask is not None:
        mask = _trailing(mask, x)
    if groups is not None:
        groups = _trailing(groups, x)
    members = {}
    for index in itertools.product(*map(range, x.shape)):
        if mask is None or bool(mask[index]):
            kept = tuple(i for d, i in enumerate(index) if d not in dims)
            members.setdefault((kept, None if groups is None else int(groups[index])), []).append(index)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for indices in members.values():
        values = [float(x[index]) for index in indices]
        if len(values) < 2:
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - correction))
        for index, value in zip(indices, values, strict=True):
            out[index] = (value - mean) / max(std, eps)
    return out


def _trailing(entry, x):
    while entry.ndim < x.ndim:
        entry = entry.unsqueeze(-1)
    return entry.expand(x.shape)


def _minus(target, value, mask):
    difference = target - torch.as_tensor(value).double()
    return difference if mask is None else torch.where(torch.as_tensor(mask) != 0, difference, 0.0)
