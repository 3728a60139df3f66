"""The kernel: a first-order linear recurrence as an associative scan over affine maps (Blelloch 1993, section 1.4.1).

One template serves every estimator and is the only place with pointer arithmetic. A program owns ``BLOCK_N`` rows and
one segment of time, which it walks in chunks of ``BLOCK_T`` steps, carrying ``x`` from chunk to chunk; where there are
fewer rows than the device has room for, a row is cut into segments: the same kernel summarises each (``SUMMARISE``),
scans the summaries, and runs again with what enters each segment.
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
def offset(strides, INDEX: tl.constexpr, rows, t, ALIGN: tl.constexpr):
    """Where source or output ``INDEX`` keeps times ``t``; ``rows``: the indices of the row dimensions, outer first.

    Row strides come divided by ``ALIGN``: multiplying by a constant tells the compiler what it may load at once.
    """
    row = rows[0] * strides[4 * INDEX]
    if strides[4 * INDEX + 1] is not None:
        row += rows[1] * strides[4 * INDEX + 1]
    if strides[4 * INDEX + 2] is not None:
        row += rows[2] * strides[4 * INDEX + 2]
    return (row * ALIGN)[:, None] + t * strides[4 * INDEX + 3]


@jit
def load(
    sources, strides, INDEX: tl.constexpr, rows, t, inside, FLAG: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr
):
    """One tile of source ``INDEX`` at times ``t``, 0 where not ``inside``."""
    value = tl.load(sources[INDEX] + offset(strides, INDEX, rows, t, ALIGN), mask=inside, other=0)
    if FLAG:
        value = value != 0
    else:
        value = value.to(DTYPE)
    return value


@jit
def scan_kernel(
    sources,  # pointers, or None: done, terminated, next_value, successor, bootstrap, mask, last, *inputs, *hypers
    strides,  # of each source and then each output: three row dimensions (/ ALIGN; None where absent) and time
    outputs,  # pointers or None; when SUMMARISE the (u, w) of each segment, [N, S] each
    enter,  # [N, S] a recurrence: x that enters each segment, or None for 0
    N,
    T_QUOTIENT,  # T / ALIGN
    CHUNKS,  # a segment
    R1,  # sizes of the second and third row dimension, or None
    R2,
    SHIFTS: tl.constexpr,  # an input, then a hyper: load at t + shift
    IS_FLAG: tl.constexpr,  # an input
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
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,  # a time offset may pass 2^31
    ALIGN: tl.constexpr,  # power of two that divides T and every row stride
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    STEP: tl.constexpr = 7  # sources before the inputs
    INPUTS: tl.constexpr = len(IS_FLAG)
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
        x0 = tl.zeros((BLOCK_N,), DTYPE)
        if enter is not None:
            if enter[k] is not None:
                x0 = tl.load(enter[k] + n * S + segment, mask=valid_row, other=0).to(DTYPE)
        carry += (x0,)
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
            valid = inside & load(sources, strides, 5, rows, t, inside, True, DTYPE, ALIGN)
        step = ()
        if TRANSITION:
            last = t == T - 1
            if sources[6] is not None:
                last = load(sources, strides, 6, rows, t, inside, True, DTYPE, ALIGN)
            terminated = load(sources, strides, 1, rows, t, inside, True, DTYPE, ALIGN)
            done = load(sources, strides, 0, rows, t, inside, True, DTYPE, ALIGN) | terminated | last
            if sources[2] is not None:
                next_value = load(sources, strides, 2, rows, t, inside, False, DTYPE, ALIGN)
            else:
                behind = tl.zeros((BLOCK_N, BLOCK_T), DTYPE)
                if sources[4] is not None:
                    behind = load(sources, strides, 4, rows, t, inside, False, DTYPE, ALIGN)
                if BOOTSTRAP_BEHIND:
                    behind = tl.where(last, behind, float("nan"))
                next_value = behind
                if sources[3] is not None:
                    ahead = t
                    if sources[6] is None:
                        ahead = t + 1
                    successor = load(sources, strides, 3, rows, ahead, inside & (ahead < T), False, DTYPE, ALIGN)
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
                tile += (load(sources, strides, STEP + k, rows, t + SHIFTS[k], there, IS_FLAG[k], DTYPE, ALIGN),)
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
                hypers += (load(sources, strides, STEP + INPUTS + k, rows, ahead, there, False, DTYPE, ALIGN),)

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
                    place = outputs[k] + offset(strides, STEP + INPUTS + len(SCALAR) + k, rows, t, ALIGN)
                    tl.store(place, tl.where(valid, result[k], 0.0), mask=inside)

    if SUMMARISE:
        for k in tl.static_range(RECURRENCES):
            tl.store(outputs[2 * k] + n * S + segment, carry[k], mask=valid_row)
            tl.store(outputs[2 * k + 1] + n * S + segment, carry_w[k], mask=valid_row)
