"""The kernel: a first-order linear recurrence as an associative scan over affine maps (Blelloch 1993, section 1.4.1).

One template serves every estimator and is the only place with pointer arithmetic. A program owns ``BLOCK_N`` rows and
one segment of time, which it walks in chunks of ``BLOCK_T`` steps, carrying ``x`` from chunk to chunk; where there are
fewer rows than the device has room for, a row is cut into segments: the same kernel first summarises each
(``SUMMARISE``), then runs again, where every program folds the summaries that lead up to its segment (``FOLD``).
"""

from __future__ import annotations

from ._triton import jit, tl


@jit
def compose(u_a, w_a, u_b, w_b):
    """The affine map ``b`` after ``a``. Where ``b`` decays by exactly 0, ``a`` is selected away, NaN and all."""
    cut = w_b == 0
    return tl.where(cut, u_b, u_b + w_b * u_a), tl.where(cut, 0.0, w_b * w_a)


@jit
def compose_exclusive(u_a, w_a, before_u_a, before_w_a, u_b, w_b, before_u_b, before_w_b):
    """:func:`compose`, and beside it the composition that leaves out the newest map."""
    u, w = compose(u_a, w_a, u_b, w_b)
    before_u, before_w = compose(u_a, w_a, before_u_b, before_w_b)
    return u, w, before_u, before_w


@jit
def apply(u, w, x):
    return tl.where(w == 0, u, u + w * x)


@jit
def offset(strides, INDEX: tl.constexpr, rows, t, LAYOUTS: tl.constexpr, ALIGN: tl.constexpr):
    """Where source or output ``INDEX`` keeps times ``t``; ``rows``: the indices of the row dimensions, outer first.

    Strides come divided by a power of two: multiplying by a constant tells the compiler what it may load at once.
    """
    LAYOUT: tl.constexpr = LAYOUTS[INDEX][0]
    TIME_ALIGN: tl.constexpr = LAYOUTS[INDEX][1]
    row = rows[0] * strides[4 * LAYOUT]
    if strides[4 * LAYOUT + 1] is not None:
        row += rows[1] * strides[4 * LAYOUT + 1]
    if strides[4 * LAYOUT + 2] is not None:
        row += rows[2] * strides[4 * LAYOUT + 2]
    return (row * ALIGN)[:, None] + t * (strides[4 * LAYOUT + 3] * TIME_ALIGN)


@jit
def load(
    sources,
    strides,
    action_stride,
    INDEX: tl.constexpr,
    rows,
    t,
    inside,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    LAYOUTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One tile of source ``INDEX`` at times ``t``, 0 where not ``inside``.

    ``KIND``: 0 a number, 1 a flag, 2 the number of the taken action, 3 its logarithm.
    """
    place = sources[INDEX] + offset(strides, INDEX, rows, t, LAYOUTS, ALIGN)
    if KIND >= 2:
        action = tl.load(sources[7] + offset(strides, 7, rows, t, LAYOUTS, ALIGN), mask=inside, other=0)
        place += action.to(tl.int64) * action_stride
    value = tl.load(place, mask=inside, other=0)
    if KIND == 1:
        value = value != 0
    else:
        value = value.to(DTYPE)
        if KIND == 3:
            value = tl.log(value)
    return value


@jit
def expectation(
    sources,
    strides,
    action_stride,
    rows,
    t,
    inside,
    A,
    ACTIONS: tl.constexpr,
    DTYPE: tl.constexpr,
    LAYOUTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The next state's value: its action values, source 2, under the policy's probabilities, source 8."""
    action = tl.arange(0, ACTIONS)[None, None, :]
    there = inside[:, :, None] & (action < A)
    values = sources[2] + offset(strides, 2, rows, t, LAYOUTS, ALIGN)[:, :, None] + action * action_stride
    policy = sources[8] + offset(strides, 8, rows, t, LAYOUTS, ALIGN)[:, :, None] + action * action_stride
    product = tl.load(values, mask=there, other=0).to(DTYPE) * tl.load(policy, mask=there, other=0).to(DTYPE)
    return tl.sum(product, 2)


@jit
def scan_kernel(
    sources,  # pointers, or None: done, terminated, next_value, successor, bootstrap, mask, last, action, next_policy,
    # and then the inputs and the hypers
    strides,  # of each layout: three row dimensions (/ ALIGN; None where absent) and time (/ its own alignment)
    outputs,  # pointers or None; when SUMMARISE the (u, w) of each segment, [N, S] each
    before,  # with FOLD, the (u, w) that a SUMMARISE launch wrote, [N, S] each, a recurrence; else None
    initial,  # [N], x beyond the window, or None for 0
    N,
    T_QUOTIENT,  # T / ALIGN
    CHUNKS,  # a segment
    R1,  # sizes of the second and third row dimension, or None
    R2,
    A,  # number of actions, or None
    action_stride,
    LAYOUTS: tl.constexpr,  # of each source and then each output: index, alignment of the time stride
    SHIFTS: tl.constexpr,  # an input, then a hyper: load at t + shift
    KINDS: tl.constexpr,  # an input, as :func:`load` has them
    WANTED: tl.constexpr,  # an output
    SCALAR: tl.constexpr,  # a hyper: 0 a number, 1 a pointer to one, 2 a tile
    COEFFICIENTS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    RECURRENCES: tl.constexpr,
    REVERSE: tl.constexpr,
    FLIP: tl.constexpr,  # a tile holds time backward, so that a backward recurrence scans it forward
    TRANSITION: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    BOOTSTRAP_BEHIND: tl.constexpr,  # the bootstrap holds only behind the last step
    SUMMARISE: tl.constexpr,
    FOLD: tl.constexpr,  # power of two of at least S segments, whose summaries lead up to this one; 0: there is one
    ACTIONS: tl.constexpr,  # power of two of at least A, 0 without
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,  # a time offset may pass 2^31
    ALIGN: tl.constexpr,  # power of two that divides T and every row stride
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    STEP: tl.constexpr = 9  # sources before the inputs
    INPUTS: tl.constexpr = len(KINDS)
    segment = tl.program_id(1)
    S = tl.num_programs(1)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_row = n < N
    if R2 is not None:
        rows = (n // (R1 * R2), n // R2 % R1, n % R2)
    elif R1 is not None:
        rows = (n // R1, n % R1, n)
    else:
        rows = (n, n, n)
    T = T_QUOTIENT * ALIGN

    carry = ()
    carry_w = ()
    for k in tl.static_range(RECURRENCES):
        entering = tl.zeros((BLOCK_N,), DTYPE)
        if initial is not None:
            entering = tl.load(initial + n, mask=valid_row, other=0).to(DTYPE)
        if FOLD:
            other = tl.arange(0, FOLD)[None, :]
            earlier = (other > segment if REVERSE else other < segment) & (other < S) & valid_row[:, None]
            fold_u = tl.load(before[2 * k] + n[:, None] * S + other, mask=earlier, other=0.0)
            fold_w = tl.load(before[2 * k + 1] + n[:, None] * S + other, mask=earlier, other=1.0)
            fold_u, fold_w = tl.associative_scan((fold_u, fold_w), 1, compose, reverse=REVERSE)
            fold_u = tl.sum(tl.where(other == (0 if REVERSE else FOLD - 1), fold_u, 0.0), 1)
            fold_w = tl.sum(tl.where(other == (0 if REVERSE else FOLD - 1), fold_w, 0.0), 1)
            entering = apply(fold_u, fold_w, entering)
        carry += (entering,)
        carry_w += (tl.full((BLOCK_N,), 1.0, DTYPE),)

    lane = tl.arange(0, BLOCK_T)[None, :]
    EDGE: tl.constexpr = 0 if REVERSE and not FLIP else BLOCK_T - 1  # the lane that the scan reaches last
    for i in tl.range(CHUNKS, num_stages=STAGES):
        if REVERSE:
            chunk = (segment + 1) * CHUNKS - 1 - i
        else:
            chunk = segment * CHUNKS + i
        if WIDE:
            chunk = chunk.to(tl.int64)
        if FLIP:
            t = chunk * BLOCK_T + (BLOCK_T - 1 - lane)
        else:
            t = chunk * BLOCK_T + lane
        inside = valid_row[:, None] & (t < T)

        valid = inside
        if sources[5] is not None:
            valid = inside & load(sources, strides, action_stride, 5, rows, t, inside, 1, DTYPE, LAYOUTS, ALIGN)
        step = ()
        if TRANSITION:
            last = t == T - 1
            if sources[6] is not None:
                last = load(sources, strides, action_stride, 6, rows, t, inside, 1, DTYPE, LAYOUTS, ALIGN)
            terminated = load(sources, strides, action_stride, 1, rows, t, inside, 1, DTYPE, LAYOUTS, ALIGN)
            done = (
                load(sources, strides, action_stride, 0, rows, t, inside, 1, DTYPE, LAYOUTS, ALIGN) | terminated | last
            )
            if ACTIONS:
                next_value = expectation(
                    sources, strides, action_stride, rows, t, inside, A, ACTIONS, DTYPE, LAYOUTS, ALIGN
                )
            elif sources[2] is not None:
                next_value = load(sources, strides, action_stride, 2, rows, t, inside, 0, DTYPE, LAYOUTS, ALIGN)
            else:
                behind = tl.zeros((BLOCK_N, BLOCK_T), DTYPE)
                if sources[4] is not None:
                    behind = load(sources, strides, action_stride, 4, rows, t, inside, 0, DTYPE, LAYOUTS, ALIGN)
                if BOOTSTRAP_BEHIND:
                    behind = tl.where(last, behind, float("nan"))
                next_value = behind
                if sources[3] is not None:
                    ahead = t
                    if sources[6] is None:
                        ahead = t + 1
                    successor = load(
                        sources, strides, action_stride, 3, rows, ahead, inside & (ahead < T), 0, DTYPE, LAYOUTS, ALIGN
                    )
                    next_value = tl.where(done, behind, successor)
            step = (done, tl.where(terminated, 0.0, next_value))

        tile = ()
        for k in tl.static_range(INPUTS):
            if sources[STEP + k] is None:
                tile += (tl.zeros((BLOCK_N, BLOCK_T), DTYPE),)
            else:
                there = inside
                if SHIFTS[k] != 0:
                    there = inside & (t + SHIFTS[k] >= 0) & (t + SHIFTS[k] < T)
                tile += (
                    load(
                        sources,
                        strides,
                        action_stride,
                        STEP + k,
                        rows,
                        t + SHIFTS[k],
                        there,
                        KINDS[k],
                        DTYPE,
                        LAYOUTS,
                        ALIGN,
                    ),
                )
        hypers = ()
        for k in tl.static_range(len(SCALAR)):
            if SCALAR[k] == 0:
                hypers += (tl.zeros((1, 1), DTYPE) + sources[STEP + INPUTS + k],)
            elif SCALAR[k] == 1:
                hypers += (tl.load(sources[STEP + INPUTS + k]).to(DTYPE),)
            else:
                there = inside
                if SHIFTS[INPUTS + k] != 0:
                    there = inside & (t + SHIFTS[INPUTS + k] >= 0) & (t + SHIFTS[INPUTS + k] < T)
                ahead = t + SHIFTS[INPUTS + k]
                hypers += (
                    load(
                        sources, strides, action_stride, STEP + INPUTS + k, rows, ahead, there, 0, DTYPE, LAYOUTS, ALIGN
                    ),
                )

        maps = COEFFICIENTS(step, tile, hypers)
        x = ()
        x_next = ()
        if RECURRENCES == 0:
            x = maps
        left = ()
        left_w = ()
        for k in tl.static_range(RECURRENCES):
            # what is no transition is the identity map
            u = tl.where(valid, maps[2 * k], 0.0).to(DTYPE)
            w = tl.where(valid, maps[2 * k + 1], 1.0).to(DTYPE)
            if EXCLUSIVE:
                nothing = tl.zeros((BLOCK_N, BLOCK_T), DTYPE)
                u, w, before_u, before_w = tl.associative_scan(
                    (u, w, nothing, nothing + 1.0), 1, compose_exclusive, reverse=REVERSE and not FLIP
                )
                x_next += (apply(before_u, before_w, carry[k][:, None]),)
            else:
                u, w = tl.associative_scan((u, w), 1, compose, reverse=REVERSE and not FLIP)
            solution = apply(u, w, carry[k][:, None])
            x += (solution,)
            left += (tl.sum(tl.where(lane == EDGE, solution, 0.0), 1),)
            if SUMMARISE:
                decay = tl.sum(tl.where(lane == EDGE, w, 0.0), 1)
                left_w += (tl.where(decay == 0, 0.0, decay * carry_w[k]),)
            else:
                left_w += (carry_w[k],)
        carry = left
        carry_w = left_w

        if not SUMMARISE:
            if EXCLUSIVE:
                result = EPILOGUE(x, x_next, step, tile, hypers)
            else:
                result = EPILOGUE(x, x, step, tile, hypers)
            for k in tl.static_range(len(WANTED)):
                if WANTED[k]:
                    place = outputs[k] + offset(strides, STEP + INPUTS + len(SCALAR) + k, rows, t, LAYOUTS, ALIGN)
                    tl.store(place, tl.where(valid, result[k], 0.0), mask=inside)

    if SUMMARISE:
        for k in tl.static_range(RECURRENCES):
            tl.store(outputs[2 * k] + n * S + segment, carry[k], mask=valid_row)
            tl.store(outputs[2 * k + 1] + n * S + segment, carry_w[k], mask=valid_row)
