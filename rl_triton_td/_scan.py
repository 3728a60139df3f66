"""The kernel: a first-order linear recurrence as an associative scan over affine maps (Blelloch 1993, section 1.4.1).

One template serves every estimator and is the only place with pointer arithmetic. A program owns ``BLOCK_N`` rows and
one segment of time, which it walks in chunks of ``BLOCK_T`` steps, carrying ``x`` from chunk to chunk. Where there are
fewer rows than the device has room for, a row is cut into segments. A segment of one chunk stays in registers while
programs tell each other what their segments do to what enters them (``MEETING``), so that memory is read once; with
longer segments the same kernel first summarises each (``SUMMARISE``), then runs again. Either way a program folds the
summaries that lead up to its segment (``FOLD``). Where rows lie side by side, a thread takes steps in a row (``RUN``),
scans them in its registers, and only runs are scanned across threads. Where they lie one after another and their length
is no multiple of what memory gives at once, chunks begin where it is read best, and rows anywhere in them (``SKEW``);
or several short ones are taken as one row, and the recurrence is cut where they meet (``STRUNG``).
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
def sealed(x, epoch):
    """A number and the ``epoch`` it was told in, as one word, which is seen whole or not at all."""
    return (epoch << 32) | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@jit
def unsealed(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@jit
def met(meeting, n, valid_row, order, S, epoch, runs, entering, RECURRENCES: tl.constexpr, FOLD: tl.constexpr):
    """What enters this segment, of each recurrence: told what it does to it, and heard the same of those before."""
    told = meeting + n * (2 * RECURRENCES) * S + order
    tl.debug_barrier()  # every warp has read the epoch from the words that now change
    for k in tl.static_range(RECURRENCES):
        u, w = map_at_end(runs[k])
        tl.atomic_xchg(told + 2 * k * S, sealed(u, epoch), mask=valid_row, sem="relaxed")
        tl.atomic_xchg(told + (2 * k + 1) * S, sealed(w, epoch), mask=valid_row, sem="relaxed")
    nth = tl.arange(0, FOLD)[None, :]
    earlier = (nth < order) & valid_row[:, None]
    place = meeting + n[:, None] * (2 * RECURRENCES) * S + nth
    result = ()
    for k in tl.static_range(RECURRENCES):
        u = tl.load(place + 2 * k * S, mask=earlier, other=0, volatile=True)
        w = tl.load(place + (2 * k + 1) * S, mask=earlier, other=0, volatile=True)
        missing = earlier & ((u >> 32 != epoch[:, None]) | (w >> 32 != epoch[:, None]))
        while tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0:
            u = tl.where(missing, tl.load(place + 2 * k * S, mask=missing, other=0, volatile=True), u)
            w = tl.where(missing, tl.load(place + (2 * k + 1) * S, mask=missing, other=0, volatile=True), w)
            missing = earlier & ((u >> 32 != epoch[:, None]) | (w >> 32 != epoch[:, None]))
        u, w = map_at_end(tl.associative_scan((unsealed(u), tl.where(earlier, unsealed(w), 1.0)), 1, compose))
        result += (moved(apply(u, w, entering[k])),)
    return result


@jit
def offset(strides, INDEX: tl.constexpr, rows, t, LAYOUTS: tl.constexpr):
    """Where source or output ``INDEX`` keeps times ``t``; ``rows``: the indices of the row dimensions, outer first.

    Strides come divided by a power of two: multiplying by a constant tells the compiler what it may load at once. With
    a ``SKEW``, times count from the last place before the row that it divides.
    """
    LAYOUT: tl.constexpr = LAYOUTS[INDEX][0]
    ROW_ALIGN: tl.constexpr = LAYOUTS[INDEX][1]
    TIME_ALIGN: tl.constexpr = LAYOUTS[INDEX][2]
    SKEW: tl.constexpr = LAYOUTS[INDEX][3]
    row = rows[0] * strides[4 * LAYOUT]
    if SKEW:
        return (row * ROW_ALIGN // SKEW * SKEW)[:, None] + t
    if strides[4 * LAYOUT + 1] is not None:
        row += rows[1] * strides[4 * LAYOUT + 1]
    if strides[4 * LAYOUT + 2] is not None:
        row += rows[2] * strides[4 * LAYOUT + 2]
    return (row * ROW_ALIGN)[:, None] + t * (strides[4 * LAYOUT + 3] * TIME_ALIGN)


@jit
def either(a, b):
    return a | b


@jit
def turn(x, GROUP: tl.constexpr):
    """Each ``GROUP`` neighbours along time, which a thread holds, end for end."""
    if GROUP == 1:
        return x
    else:
        return tl.reshape(tl.flip(tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP)), 2), x.shape)


@jit
def bits(x):
    """``x`` as the integer whose bits it is."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True)
    elif x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x


@jit
def number(x, DTYPE: tl.constexpr):
    """What :func:`bits` made of a number of ``DTYPE``."""
    if x.dtype == DTYPE:
        return x
    else:
        return x.to(DTYPE, bitcast=True)


@jit
def at_end(x):
    """What a scanned tile holds for the step that the scan reaches last."""
    lane = tl.arange(0, x.shape[1])[None, :]
    return number(tl.reduce(tl.where(lane == x.shape[1] - 1, bits(x), 0), 1, either), x.dtype)


@jit
def each_either(u_a, w_a, u_b, w_b):
    return u_a | u_b, w_a | w_b


@jit
def map_at_end(maps):
    """:func:`at_end` of the two numbers of maps, or of each run of them, in one pass through the warps."""
    lane = tl.arange(0, maps[0].shape[1])
    lane = lane[None, :, None] if len(maps[0].shape) == 3 else lane[None, :]
    last = lane == maps[0].shape[1] - 1
    u, w = tl.reduce((tl.where(last, bits(maps[0]), 0), tl.where(last, bits(maps[1]), 0)), 1, each_either)
    return number(u, maps[0].dtype), number(w, maps[1].dtype)


@jit
def moved(x):
    """``x`` in no layout of its own: the compiler would else give it to the tiles that ``x`` meets, and move those."""
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)


@jit
def scan_steps(u, w, EXCLUSIVE: tl.constexpr, RUN: tl.constexpr):
    """Compositions of the maps of a tile along time: ``(maps, runs)``.

    ``maps``: of all maps up to each step, and with ``EXCLUSIVE`` of those before it. Where a thread holds ``RUN``
    steps in a row, ``maps [BLOCK_N, RUN, L]`` begin with the run; ``runs`` are then the compositions of all runs up
    to each. Else ``runs`` are ``maps``.
    """
    if RUN > 1:
        u = tl.reshape(u, (u.shape[0], RUN, u.shape[1] // RUN))
        w = tl.reshape(w, (w.shape[0], RUN, w.shape[1] // RUN))
    if EXCLUSIVE:
        nothing = tl.zeros(u.shape, u.dtype)
        maps = tl.associative_scan((u, w, nothing, nothing + 1.0), 1, compose_exclusive)
    else:
        maps = tl.associative_scan((u, w), 1, compose)
    runs = maps
    if RUN > 1:
        whole_u, whole_w = map_at_end(maps)
        runs = tl.associative_scan((whole_u, whole_w), 1, compose)
    return maps, runs


@jit
def solve(u, w, runs, x, RUN: tl.constexpr):
    """What a tile's compositions, of :func:`scan_steps`, make of what enters it."""
    if RUN > 1:
        after = apply(runs[0], runs[1], x[:, None])
        nth = tl.arange(0, after.shape[1])[None, :]
        before = tl.gather(after, tl.broadcast_to(tl.where(nth == 0, 0, nth - 1), after.shape), 1)
        entering = tl.where(nth == 0, x[:, None], before)
        return tl.reshape(apply(u, w, entering[:, None, :]), (u.shape[0], u.shape[1] * u.shape[2]))
    else:
        return apply(u, w, x[:, None])


@jit
def leaving(runs, x):
    """What leaves the tile."""
    return at_end(apply(runs[0], runs[1], x[:, None]))


@jit
def latest(x, found, beyond, TURNED: tl.constexpr, RUN: tl.constexpr):
    """``x`` where it was last ``found`` in scan order, ``beyond`` where nowhere yet; and that at the tile's end."""
    u = turn(tl.where(found, x, 0.0).to(beyond.dtype), TURNED)
    w = turn(tl.where(found, 0.0, 1.0).to(beyond.dtype), TURNED)
    maps, runs = scan_steps(u, w, False, RUN)
    x = solve(maps[0], maps[1], runs, beyond, RUN)
    return turn(x, TURNED), leaving(runs, beyond)


@jit
def swap(x):
    """Neighbours along the last dimension, of 2, in each other's place."""
    a, b = tl.split(x)
    return tl.join(b, a)


@jit
def rotate(x, SHIFT: tl.constexpr):
    """Each four neighbours by one place: what was at ``t + SHIFT`` comes to ``t``, but for the outermost."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    if SHIFT == 1:
        return tl.reshape(tl.join(odd, swap(even)), x.shape)
    else:
        return tl.reshape(tl.join(swap(odd), even), x.shape)


@jit
def outermost(bounds, SHIFT: tl.constexpr = 0):
    """Of each four neighbours, a ``GROUP``, whether some and whether all lie within their row, or its string."""
    valid_row = bounds[0][:, None]
    group = bounds[3] + SHIFT
    some = valid_row & (group + 3 >= bounds[1]) & (group < bounds[2])
    return some, valid_row & (group >= bounds[1]) & (group + 3 < bounds[2])


@jit
def read(
    sources,
    strides,
    action_stride,
    INDEX: tl.constexpr,
    rows,
    t,
    inside,
    KIND: tl.constexpr,
    LAYOUTS: tl.constexpr,
    bounds=None,
    GROUP: tl.constexpr = 1,
    SHIFT: tl.constexpr = 0,
):
    """What source ``INDEX`` holds at times ``t + SHIFT``, 0 where not ``inside``.

    A ``GROUP`` of which some are within the row is read whole: behind the last row up to three numbers of the same 16
    bytes, which are not looked at.
    """
    place = sources[INDEX] + offset(strides, INDEX, rows, t + SHIFT, LAYOUTS)
    if KIND >= 2:
        action = tl.load(sources[7] + offset(strides, 7, rows, t, LAYOUTS), mask=inside, other=0)
        place += action.to(tl.int64) * action_stride
    if GROUP == 4 and LAYOUTS[INDEX][4]:
        some, _ = outermost(bounds, SHIFT)
        return tl.where(inside, tl.load(place, mask=some, other=0), 0)
    else:
        return tl.load(place, mask=inside, other=0)


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
    bounds=None,
    GROUP: tl.constexpr = 1,
    SHIFT: tl.constexpr = 0,
):
    """Source ``INDEX`` at times ``t + SHIFT``, 0 where not ``inside`` or, shifted, outside its row.

    ``KIND``: 0 a number, 1 a flag, 2 the number of the taken action, 3 its logarithm. ``bounds``: whether there is such
    a row, its first time, the time behind its last, the first time of each ``GROUP`` that one load brings, and of rows
    strung together whether a step is the first and whether the last of one.
    """
    if SHIFT == 0:
        value = read(sources, strides, action_stride, INDEX, rows, t, inside, KIND, LAYOUTS, bounds, GROUP)
    else:
        there = inside & (t + SHIFT >= bounds[1]) & (t + SHIFT < bounds[2])
        if GROUP == 4 and SHIFT * SHIFT == 1:
            # off by one nothing is aligned: three of four neighbours are in the thread's registers, the fourth is read
            value = read(sources, strides, action_stride, INDEX, rows, t, inside, KIND, LAYOUTS, bounds, GROUP)
            value = rotate(value, SHIFT)
            outer = t & 3 == (3 if SHIFT == 1 else 0)
            if KIND == 1:  # single bytes are not copied ahead, four are
                there = bounds[0][:, None] & (t + 4 * SHIFT >= bounds[1]) & (t + 4 * SHIFT < bounds[2])
                beside = read(
                    sources, strides, action_stride, INDEX, rows, t, there, KIND, LAYOUTS, bounds, GROUP, 4 * SHIFT
                )
                value = tl.where(outer, rotate(beside, SHIFT), value)
            else:
                beside = read(sources, strides, action_stride, INDEX, rows, t + SHIFT, there & outer, KIND, LAYOUTS)
                value = tl.where(outer, beside, value)
        else:
            value = read(sources, strides, action_stride, INDEX, rows, t + SHIFT, there, KIND, LAYOUTS)
        if len(bounds) > 4:
            value = tl.where(bounds[4] if SHIFT < 0 else bounds[5], 0, value)
    if KIND == 1:
        value = value != 0
    else:
        value = value.to(DTYPE)
        if KIND == 3:
            value = tl.log(value)
    return value


@jit
def at_edges(
    source,
    row_quotient,
    ROW_ALIGN: tl.constexpr,
    string,
    n,
    start,
    bounds,
    LAST: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Of one number a row, with rows strung together: each at the four neighbours that hold the first step of its row,
    or the ``LAST``; of four at most one does."""
    four = tl.arange(0, BLOCK_T // 4)[None, :] * 4
    four = start + (BLOCK_T - 4 - four if REVERSE else four)
    row = tl.umulhi(four if LAST else four + (string[0] - 1), string[1]) >> string[2]
    edge = row * string[0] + (string[0] - 1 if LAST else 0)
    there = bounds[0][:, None] & (edge < four + 4) & (edge < bounds[2])
    place = ((n * string[3])[:, None] + row) * row_quotient * ROW_ALIGN
    x = tl.load(source + place, mask=there, other=0)
    return tl.reshape(tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], 4)), (x.shape[0], BLOCK_T))


@jit
def expectation(
    sources,
    strides,
    action_stride,
    rows,
    t,
    inside,
    ACTIONS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    LAYOUTS: tl.constexpr,
):
    """The next state's value: its action values, source 2, under the policy's probabilities, source 8.

    A thread takes the ``WIDTH`` actions that one load brings at a time, so that no sum crosses threads.
    """
    values = sources[2] + offset(strides, 2, rows, t, LAYOUTS)[:, :, None]
    policy = sources[8] + offset(strides, 8, rows, t, LAYOUTS)[:, :, None]
    total = tl.zeros(inside.shape, DTYPE)
    for first in range(0, ACTIONS, WIDTH):
        place = (first + tl.arange(0, WIDTH)[None, None, :]) * action_stride
        product = tl.load(values + place, mask=inside[:, :, None], other=0).to(DTYPE)
        product *= tl.load(policy + place, mask=inside[:, :, None], other=0).to(DTYPE)
        total += tl.sum(product, 2)
    return total


@jit
def scan_kernel(
    sources,  # pointers, or None: done, terminated, next_value, successor, bootstrap, mask, last, action, next_policy,
    # and then the inputs and the hypers
    strides,  # of each layout: three row dimensions (None where absent) and time, each / its alignment
    outputs,  # pointers or None; when SUMMARISE the (u, w) of each segment, [N, S] each
    before,  # with FOLD, the (u, w) that a SUMMARISE launch wrote, [N, S] each, a recurrence; else None
    initial,  # x beyond the window, one number a row, or None for 0
    meeting,  # [N, 2 RECURRENCES, S] words, :func:`sealed` by the launch before; or None: segments do not meet
    N,  # rows
    T_QUOTIENT,  # their steps T / ALIGN
    string,  # of rows that are several strung together: the steps of one, what to multiply and shift by to divide by
    # them, how many are together, and how many steps all have, if fewer than N T; else None
    CHUNKS,  # a segment
    R1,  # sizes of the second and third row dimension, or None
    R2,
    action_stride,
    LAYOUTS: tl.constexpr,  # of each source and then each output: index, powers of two that divide row and time
    # strides, SKEW if any, whether of four neighbours some may lie outside their row, or the rows strung together
    KINDS: tl.constexpr,  # an input, as :func:`load` has them
    NEIGHBOURS: tl.constexpr,  # what is read at a neighbouring step: source, kind, shift
    BESIDE: tl.constexpr,  # where among them the successor, each input and each hyper is; None where it is not
    WANTED: tl.constexpr,  # an output
    SCALAR: tl.constexpr,  # a hyper: 0 a number, 1 a pointer to one, 2 a tile
    COEFFICIENTS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    RECURRENCES: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,  # neighbours that go together; where time runs backward, a tile holds groups backward
    HELD: tl.constexpr,  # neighbours that one load brings
    RUN: tl.constexpr,  # steps in a row that a thread holds, far from one another in its tile
    PAST_MASK: tl.constexpr,  # 1: a step's neighbour is the nearest valid one; 2: which another segment may hold
    TRANSITION: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    BOOTSTRAP_BEHIND: tl.constexpr,  # the bootstrap holds only behind the last step
    SUMMARISE: tl.constexpr,
    FOLD: tl.constexpr,  # power of two of at least S segments, whose summaries lead up to this one; 0: there is one
    ACTIONS: tl.constexpr,  # how many there are, 0 without
    WIDTH: tl.constexpr,  # of them one load brings
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,  # a time offset may pass 2^31
    ALIGN: tl.constexpr,  # power of two that divides T
    SKEW: tl.constexpr,  # chunks begin where memory is read best, this many steps apart, rows anywhere; or 0
    STRUNG: tl.constexpr,  # whether what is launched as a row is several, one behind the other
    WHOLE_ROWS: tl.constexpr,  # whether every program's rows all exist
    WHOLE_STEPS: tl.constexpr,  # whether every chunk's steps do
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    STEP: tl.constexpr = 9  # sources before the inputs
    INPUTS: tl.constexpr = len(KINDS)
    segment = tl.program_id(1)
    S = tl.num_programs(1)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BLOCK_N > 4:
        n = tl.max_contiguous(n, 4)  # that a thread takes: more of flags would spread out the numbers
    valid_row = tl.full((BLOCK_N,), True, tl.int1) if WHOLE_ROWS else n < N
    if R2 is not None:
        rows = (n // (R1 * R2), n // R2 % R1, n % R2)
    elif R1 is not None:
        rows = (n // R1, n % R1, n)
    else:
        rows = (n, n, n)
    T = T_QUOTIENT * ALIGN
    first = 0
    if SKEW:
        first = ((n * T_QUOTIENT % (SKEW // ALIGN)).to(tl.int32) * ALIGN)[:, None]
    end = first + T
    if STRUNG:
        if string[4] is not None:
            end = tl.minimum(string[4] - n * T, T).to(tl.int32)[:, None]
    TURNED: tl.constexpr = GROUP if REVERSE else 1

    # where segments meet, those that a program waits for have a lower number: they have started
    order = S - 1 - segment if REVERSE else segment
    if meeting is not None and REVERSE:
        segment, order = order, segment
    epoch = tl.zeros((BLOCK_N,), tl.int64)
    if meeting is not None:
        left_there = tl.load(meeting + n * (2 * RECURRENCES) * S + order, mask=valid_row, other=0)
        epoch = ((left_there >> 32) + 1) & 0x7FFFFFFF
    carry = ()
    carry_w = ()
    for k in tl.static_range(RECURRENCES):
        entering = tl.zeros((BLOCK_N,), DTYPE)
        if initial is not None and not STRUNG:
            entering = tl.load(initial + n, mask=valid_row, other=0).to(DTYPE)
        if FOLD and meeting is None:
            nth = tl.arange(0, FOLD)[None, :]
            other = S - 1 - nth if REVERSE else nth
            earlier = (nth < order) & valid_row[:, None]
            fold_u = tl.load(before[2 * k] + n[:, None] * S + other, mask=earlier, other=0.0)
            fold_w = tl.load(before[2 * k + 1] + n[:, None] * S + other, mask=earlier, other=1.0)
            fold_u, fold_w = tl.associative_scan((fold_u, fold_w), 1, compose)
            entering = apply(at_end(fold_u), at_end(fold_w), entering)
        carry += (entering,)
        carry_w += (tl.full((BLOCK_N,), 1.0, DTYPE),)

    nth = tl.arange(0, BLOCK_T)[None, :]
    if RUN > 1:
        nth = nth % (BLOCK_T // RUN) * RUN + nth // (BLOCK_T // RUN)
    group = nth // GROUP * GROUP
    group_of_lane = BLOCK_T - GROUP - group if REVERSE else group
    step_of_lane = group_of_lane + nth % GROUP

    follows = tl.zeros((BLOCK_N,), tl.int32)  # whether a valid step lies beyond, and below what it holds
    if PAST_MASK == 2:
        at = (segment + 1) * CHUNKS * BLOCK_T if REVERSE else segment * CHUNKS * BLOCK_T - BLOCK_T
        if WIDE:
            at = at.to(tl.int64)
        found_at = follows + at
        while (at > -BLOCK_T) & (at < T + SKEW) & (tl.sum((valid_row & (follows == 0)).to(tl.int32), 0) > 0):
            time = at + step_of_lane
            looked_at = valid_row[:, None] & (time >= first) & (time < end)
            seen = load(sources, strides, action_stride, 5, rows, time, looked_at, 1, DTYPE, LAYOUTS)
            nearest = tl.min(tl.where(seen, time, T + SKEW), 1) if REVERSE else tl.max(tl.where(seen, time, -1), 1)
            here = (follows == 0) & (nearest >= 0) & (nearest < T + SKEW)
            found_at = tl.where(here, nearest, found_at)
            follows = follows | here.to(tl.int32)
            at += BLOCK_T if REVERSE else -BLOCK_T
    beyond = ()
    for k in tl.static_range(len(NEIGHBOURS)):
        held_there = tl.zeros((BLOCK_N,), DTYPE)
        if PAST_MASK == 2:
            one = load(
                sources, strides, action_stride, NEIGHBOURS[k][0], rows, found_at[:, None], (follows != 0)[:, None],
                NEIGHBOURS[k][1], DTYPE, LAYOUTS,
            )  # fmt: skip
            held_there = at_end(one.to(DTYPE))
        beyond += (held_there,)

    for i in tl.range(CHUNKS, num_stages=STAGES):
        if REVERSE:
            chunk = (segment + 1) * CHUNKS - 1 - i
        else:
            chunk = segment * CHUNKS + i
        if WIDE:
            chunk = chunk.to(tl.int64)
        t = chunk * BLOCK_T + step_of_lane
        bounds = (valid_row, first, end, chunk * BLOCK_T + group_of_lane)
        inside = valid_row[:, None] & (tl.full((1, BLOCK_T), True, tl.int1) if WHOLE_STEPS else t < end)
        if SKEW:
            inside = inside & (t >= first)

        last = t == end - 1
        edge = last
        if STRUNG:
            begins = (tl.umulhi(bounds[3], string[1]) >> string[2]) * string[0]
            first_of_row = (t == begins) | (t == begins + string[0])  # of four neighbours' two rows
            last = t == begins + (string[0] - 1)
            edge = last if REVERSE else first_of_row
            bounds = (valid_row, first, end, bounds[3], first_of_row, last)
        valid = inside
        if sources[5] is not None:
            valid = inside & load(sources, strides, action_stride, 5, rows, t, inside, 1, DTYPE, LAYOUTS, bounds, HELD)
        if PAST_MASK:
            near: tl.constexpr = 1 if REVERSE else -1
            found = load(sources, strides, action_stride, 5, rows, t, inside, 1, DTYPE, LAYOUTS, bounds, HELD, near)
            if TRANSITION:
                farthest = tl.max(tl.where(found, t, -1), 1)  # transitions run backward
                last = (follows == 0)[:, None] & (t > farthest[:, None])
                follows = follows | (farthest >= 0).to(tl.int32)
        elif sources[6] is not None:
            last = load(sources, strides, action_stride, 6, rows, t, inside, 1, DTYPE, LAYOUTS, bounds, HELD)
        beside = ()
        held = ()
        for k in tl.static_range(len(NEIGHBOURS)):
            neighbour = load(
                sources, strides, action_stride, NEIGHBOURS[k][0], rows, t, inside, NEIGHBOURS[k][1], DTYPE, LAYOUTS,
                bounds, HELD, NEIGHBOURS[k][2],
            )  # fmt: skip
            at_the_end = beyond[k]
            if PAST_MASK:
                neighbour, at_the_end = latest(neighbour, found, at_the_end, TURNED, RUN)
                if NEIGHBOURS[k][1] == 1:
                    neighbour = neighbour != 0
            beside += (neighbour,)
            held += (at_the_end,)
        beyond = held

        step = ()
        if TRANSITION:
            terminated = load(sources, strides, action_stride, 1, rows, t, inside, 1, DTYPE, LAYOUTS, bounds, HELD)
            done = (
                load(sources, strides, action_stride, 0, rows, t, inside, 1, DTYPE, LAYOUTS, bounds, HELD)
                | terminated
                | last
            )
            if ACTIONS:
                next_value = expectation(
                    sources, strides, action_stride, rows, t, inside, ACTIONS, WIDTH, DTYPE, LAYOUTS
                )
            elif sources[2] is not None:
                next_value = load(sources, strides, action_stride, 2, rows, t, inside, 0, DTYPE, LAYOUTS, bounds, HELD)
            else:
                next_value = tl.zeros((BLOCK_N, BLOCK_T), DTYPE)
                if BOOTSTRAP_BEHIND:  # one number a row
                    if sources[4] is not None and STRUNG:
                        next_value += at_edges(
                            sources[4],
                            strides[4 * LAYOUTS[4][0]],
                            LAYOUTS[4][1],
                            string,
                            n,
                            chunk * BLOCK_T,
                            bounds,
                            True,
                            REVERSE,
                            BLOCK_T,
                        ).to(DTYPE)
                    elif sources[4] is not None:
                        start = tl.zeros((1, 1), tl.int32) + first
                        next_value += load(
                            sources,
                            strides,
                            action_stride,
                            4,
                            rows,
                            start,
                            valid_row[:, None],
                            0,
                            DTYPE,
                            LAYOUTS,
                        )
                    next_value = tl.where(last, next_value, float("nan"))
                elif sources[4] is not None:
                    next_value = load(
                        sources, strides, action_stride, 4, rows, t, inside, 0, DTYPE, LAYOUTS, bounds, HELD
                    )
                if BESIDE[0] is not None:
                    next_value = tl.where(done, next_value, beside[BESIDE[0]])
                elif sources[3] is not None:
                    successor = load(
                        sources, strides, action_stride, 3, rows, t, inside, 0, DTYPE, LAYOUTS, bounds, HELD
                    )
                    next_value = tl.where(done, next_value, successor)
            step = (done, tl.where(terminated, 0.0, next_value))

        tile = ()
        for k in tl.static_range(INPUTS):
            if BESIDE[1 + k] is not None:
                tile += (beside[BESIDE[1 + k]],)
            elif sources[STEP + k] is None:
                tile += (tl.zeros((BLOCK_N, BLOCK_T), DTYPE),)
            else:
                tile += (
                    load(
                        sources, strides, action_stride, STEP + k, rows, t, inside, KINDS[k], DTYPE, LAYOUTS, bounds,
                        HELD,
                    ),
                )  # fmt: skip
        hypers = ()
        for k in tl.static_range(len(SCALAR)):
            if SCALAR[k] == 0:
                hypers += (tl.zeros((1, 1), DTYPE) + sources[STEP + INPUTS + k],)
            elif SCALAR[k] == 1:
                hypers += (tl.load(sources[STEP + INPUTS + k]).to(DTYPE),)
            elif BESIDE[1 + INPUTS + k] is not None:
                hypers += (beside[BESIDE[1 + INPUTS + k]],)
            else:
                hypers += (
                    load(
                        sources, strides, action_stride, STEP + INPUTS + k, rows, t, inside, 0, DTYPE, LAYOUTS, bounds,
                        HELD,
                    ),
                )  # fmt: skip

        maps = COEFFICIENTS(step, tile, hypers)
        enters = tl.zeros((BLOCK_N, BLOCK_T), DTYPE)
        if STRUNG and initial is not None:
            enters += at_edges(initial, 1, 1, string, n, chunk * BLOCK_T, bounds, REVERSE, REVERSE, BLOCK_T).to(DTYPE)
        x = ()
        x_next = ()
        if RECURRENCES == 0:
            x = maps
        scanned = ()
        run = ()
        for k in tl.static_range(RECURRENCES):
            # what is no transition is the identity map
            u = tl.where(valid, maps[2 * k], 0.0).to(DTYPE)
            w = tl.where(valid, maps[2 * k + 1], 1.0).to(DTYPE)
            if STRUNG and not (TRANSITION and REVERSE):  # whose ``w`` is 0 at the last step as it is
                u, w = tl.where(edge, apply(u, w, enters), u), tl.where(edge, 0.0, w)
            maps_to, runs = scan_steps(turn(u, TURNED), turn(w, TURNED), EXCLUSIVE, RUN)
            scanned += (maps_to,)
            run += (runs,)
        if meeting is not None:
            carry = met(meeting, n, valid_row, order, S, epoch, run, carry, RECURRENCES, FOLD)
        left = ()
        left_w = ()
        for k in tl.static_range(RECURRENCES):
            if EXCLUSIVE:
                beyond_step = turn(solve(scanned[k][2], scanned[k][3], run[k], carry[k], RUN), TURNED)
                x_next += (tl.where(edge, enters, beyond_step) if STRUNG else beyond_step,)
            solution = solve(scanned[k][0], scanned[k][1], run[k], carry[k], RUN)
            x += (turn(solution, TURNED),)
            left += (leaving(run[k], carry[k]),)
            if SUMMARISE:
                decay = at_end(run[k][1])
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
                    place = outputs[k] + offset(strides, STEP + INPUTS + len(SCALAR) + k, rows, t, LAYOUTS)
                    solved = result[k] if sources[5] is None else tl.where(valid, result[k], 0.0)
                    if LAYOUTS[STEP + INPUTS + len(SCALAR) + k][4]:
                        _, all_inside = outermost(bounds)
                        tl.store(place, solved, mask=all_inside)
                        tl.store(place, solved, mask=inside & ~all_inside)
                    else:
                        tl.store(place, solved, mask=inside)

    if SUMMARISE:
        for k in tl.static_range(RECURRENCES):
            tl.store(outputs[2 * k] + n * S + segment, carry[k], mask=valid_row)
            tl.store(outputs[2 * k + 1] + n * S + segment, carry_w[k], mask=valid_row)
