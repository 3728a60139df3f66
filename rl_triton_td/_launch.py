"""Launching :func:`._scan.scan_kernel`: row layout, tile plan, one launch or two, and the cache of launches."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _scan
from ._replay import MEETING, Place, driver, not_remembered, nothing_remembered, record
from ._triton import tl, triton
from .specs import Spec

INT32 = 2**31
HEAD = ("done", "terminated", "next_value", "successor", "bootstrap", "mask", "last", "action", "next_policy")
SHARED_MEMORY = 176 * 1024  # bytes of tiles that a pipelined loop may have under way, at most
SCRATCH = 50 * 1024  # bytes that the rest of a program may need of it
GROUP = 4  # neighbours, along time or along rows, that a thread reads at once
SECTOR = 32  # steps of which flags, and all that is wider, fill what memory gives at once
LIGHT = 10  # bytes of a step, up to which instructions bound it
CROWDED = 48  # bytes of a step, from where longer tiles spill
TIME_MAJOR = (
    # from so many rows a multiprocessor; tiles for up to 10 bytes a step, up to 18, more, exclusive, masked, actions
    (768, (256, 4, 2, 3), (256, 2, 2, 4), (256, 2, 2, 4), (64, 2, 1, 4), (256, 4, 2, 3), (64, 4, 4, 1)),
    (384, (128, 8, 1, 4), (128, 4, 1, 3), (64, 2, 1, 4), (64, 2, 1, 4), (128, 4, 1, 3), (64, 4, 4, 1)),
    (192, (64, 8, 1, 5), (64, 8, 2, 3), (64, 4, 1, 4), (64, 8, 2, 3), (64, 8, 1, 3), (32, 8, 8, 1)),
    (96, (64, 32, 4, 4), (64, 16, 2, 4), (64, 16, 2, 3), (64, 16, 4, 3), (64, 16, 2, 3), (16, 8, 4, 1)),
    (48, (32, 64, 4, 4), (32, 32, 2, 4), (32, 32, 2, 3), (32, 32, 4, 3), (64, 32, 4, 3), (8, 16, 4, 1)),
    (24, (16, 128, 4, 4), (32, 64, 4, 4), (32, 64, 4, 4), (32, 64, 8, 3), (32, 64, 4, 3), (8, 64, 16, 1)),
    (12, (16, 128, 4, 4), (16, 128, 4, 4), (16, 256, 8, 3), (16, 64, 4, 4), (), ()),
)  # fmt: skip
ROW_DIMS = 3  # that the kernel indexes; a layout with more is launched slice by slice


@dataclass(frozen=True)
class Tile:
    """What one program holds at a time, how many segments a row is cut into, and how many rows are taken as one."""

    block_n: int
    block_t: int
    num_warps: int
    segments: int = 1
    num_stages: int = 1
    strung: int = 1

    @property
    def run(self) -> int:
        """How many steps in a row a thread takes, where it reads ``GROUP`` neighbouring rows: 1 where no less work."""
        run = self.block_n * self.block_t // (32 * self.num_warps * min(GROUP, self.block_n))
        return run if (4 if self.num_warps == 1 else 2) <= run < self.block_t else 1


def tile_plan(
    rows: int,
    steps: int,
    time_contiguous: bool,
    *,
    exclusive: bool = False,
    masked: bool = False,
    shifted: int = 0,
    actions: int = 0,
    late: int = 0,
    strung: int = 1,
    step_bytes: int = 0,
    multiprocessors: int = 132,
) -> Tile:
    """The tile for ``rows`` sequences of ``steps`` steps, contiguous along time or along rows.

    Args:
        exclusive: every step's solution and its successor's are held at once.
        masked: steps look for the nearest valid one.
        shifted: how many numbers of a step are read at its neighbour.
        actions: how many values stand for one step.
        late: by how many steps a row may begin after the place where its tile does.
        strung: how many rows, one behind the other, are taken as one.
        step_bytes: what is read and written at one step.
    """
    rows, steps = -(-rows // strung), strung * steps + late
    stages, few = 3, rows * steps < 2 * multiprocessors * 1024  # too few steps to keep all of the device busy
    enough = 2 * multiprocessors  # programs; with fewer, rows are cut
    light, room = step_bytes <= LIGHT, _power_of_2(steps)
    if actions and time_contiguous:
        many = rows >= 12 * multiprocessors
        block_t, stages = min(room, 64 if many else 1024 if steps <= 1024 else 512), 1
        block_n = min(_power_of_2(rows), max(1, 64 // block_t))
        warps = max(1 if many else 4, block_n * block_t // 64)
    elif (
        time_contiguous
        and (128 if steps < 0.55 * room else 256 if light else 512) < steps <= 4096
        and (steps < (0.9 if light else 0.7) * room or steps > 2048 and (light or shifted > 2))
        and rows * max(1, room // 2048) >= 32 * multiprocessors
    ):  # piece by piece: what would be left empty of a longer tile costs more than the turns of a loop
        small, bare = shifted > 2 or masked and exclusive, light and not masked
        block_n, block_t = max(1, 1024 // room), room // 8
        block_t = max(min(block_t, 128), room // 16) if small else min(block_t, 256) if bare else block_t
        warps = 1 if small or bare else room // (1024 if masked or exclusive or late else 2048)
    elif time_contiguous:
        many = rows >= 8 * multiprocessors
        if steps > 4096:
            moderate = steps <= 2**15 or rows >= enough or masked or step_bytes > CROWDED
            block_t = 512 if many and (light or shifted) else 1024 if moderate else 2048 if steps <= 2**17 else 4096
        else:  # a row in one piece, unless that is more than lies well in registers
            crowded = masked or (steps > 2048 and (exclusive or shifted)) or step_bytes > CROWDED
            longest = 1024 if many and light and steps > 2048 else 4096
            block_t = min(room, 256 if masked and exclusive else 512 if crowded else longest)
        stages = 2 if masked and exclusive else 3
        elements = 512 if masked else 1024
        while elements > 256 and rows * steps < 2 * multiprocessors * elements:
            elements //= 2
        block_n = min(_power_of_2(rows), max(1, elements // block_t)) if steps <= block_t else 1
        short = block_t <= 128 and not (light and many and steps < block_t)
        dense = exclusive or masked or shifted and many or short or few or late and not light
        wide = light and block_t > (512 if strung == 1 else 1024) and steps <= block_t and not late
        warps = block_n * block_t // (128 if dense else 512 if wide else 256)
        warps = min(max(warps, 2 if masked or few or block_t > 512 else 4), 16 if exclusive or shifted and many else 8)
    else:  # rows side by side; the more of them, the more a program takes and the fewer steps it needs at a time
        kind = 5 if actions else 4 if masked else 3 if exclusive else 0 if light else 1 if step_bytes <= 18 else 2
        per_one = rows // multiprocessors
        tiles = next((tiles for least, *tiles in TIME_MAJOR if per_one >= max(least, 24 * few)), ((),) * 6)
        if tiles[kind]:
            block_n, block_t, warps, stages = tiles[kind]
            if step_bytes > CROWDED and not actions:
                block_n, block_t = min(block_n, 32), max(2, block_t // 2)
            enough = 0
        elif actions:
            block_n, block_t, warps, stages = 8, 64, 8, 1
        else:
            narrow = few or rows < 16 or masked or step_bytes > CROWDED
            block_n, block_t, warps, stages = (8, 128, 4, 1) if narrow else (16, 256, 8, 1)
        block_n, block_t = min(_power_of_2(rows), block_n), min(room, block_t)
    programs, chunks = -(-rows // block_n), -(-steps // block_t)
    segments = 1
    if chunks > 1 and programs < enough:
        # every program folds the summaries of all the others: no more than lie well in its registers
        most = min(1024, max(1, 256 * warps // block_n))
        segments = chunks if chunks <= most else min(-(-8 * multiprocessors // programs), most)
        segments = -(-chunks // -(-chunks // segments))
    warps = max(1, min(warps, block_n * block_t // 32))
    return Tile(block_n, block_t, warps, segments, stages if chunks > segments else 1, strung)


def _late(rows: int, steps: int, multiprocessors: int) -> int:
    """By how many steps a row may begin after the place where neighbours are read at once; 0 where those are not."""
    late = GROUP - math.gcd(GROUP, steps)
    fits = steps + late <= _power_of_2(steps)  # the shortest tile that holds such a row
    return late if steps >= 64 and (fits or steps > 2048 or rows >= 32 * multiprocessors) else 0


def _strung(rows: int, steps: int, step_bytes: int) -> int:
    """How many rows, one behind the other, are taken as one: as many as fill a tile, where one has none that suits."""
    least = GROUP // math.gcd(GROUP, steps)  # so that the next begins where memory is read best
    if steps < GROUP or least == 1 and (step_bytes <= LIGHT or _fill(steps) > 0.7):
        return 1
    most = min(rows, (2048 if least > 1 else 1024) // steps)
    best = max(range(least, 1 + most, least), key=lambda k: _fill(k * steps), default=1)
    return best if _fill(best * steps) > 0.85 else 1


def _fill(steps: int) -> float:
    """How much of its tile a row takes."""
    return steps / _power_of_2(steps)


def _divisor(n: int) -> tuple[int, int]:
    """What to multiply by and shift by to divide by ``n > 2``: ``umulhi(x, a) >> b == x // n`` for all x < 2^30.

    Granlund and Montgomery 1994, "Division by invariant integers using multiplication", theorem 4.2; with one bit less,
    so that the multiplier is a positive number of 32 bits.
    """
    bits = (n - 1).bit_length()
    return -(-(1 << 30 + bits) // n), bits - 2


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


_forced_tile: Tile | None = None


class force_tile:
    """Context manager for tests and tuning: every launch inside takes ``tile``."""

    def __init__(self, tile: Tile):
        self.tile = tile

    def __enter__(self):
        global _forced_tile
        self.outer, _forced_tile = _forced_tile, self.tile
        self.forgetful = nothing_remembered()
        self.forgetful.__enter__()

    def __exit__(self, *_):
        global _forced_tile
        _forced_tile = self.outer
        self.forgetful.__exit__()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of tiles that a pipelined loop may have under way."""
    if device.type != "cuda":
        return SHARED_MEMORY
    most = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024)
    return min(SHARED_MEMORY, most - SCRATCH)


def _merge_rows(shape, time_dim: int, strides: list[tuple[int, ...]]):
    """Row dimensions of ``shape``, merged where every tensor's strides allow it: ``(sizes, strides)``, outer first."""
    sizes, merged = [], [[] for _ in strides]
    for dim, size in enumerate(shape):
        if dim == time_dim or size == 1:
            continue
        if sizes and all(m[-1] == s[dim] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[dim]
        else:
            sizes.append(size)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[dim])
    return sizes, merged


class _TooManyRowDimensions(Exception):
    pass


class _Entries:
    """The tensors of a launch as the kernel walks them: rows, and the steps along each."""

    def __init__(self, shape, time_dim, sources, outputs, twins, behind):
        entries = [(i, x) for i, x in enumerate((*sources, *outputs)) if isinstance(x, Tensor) and x.ndim]
        self.sizes, merged = _merge_rows(shape, time_dim, [x.stride() for _, x in entries])
        if len(self.sizes) > ROW_DIMS:
            raise _TooManyRowDimensions
        self.rows, self.steps = math.prod(self.sizes), shape[time_dim]
        self.strides = [(x, m, x.stride(time_dim)) for (_, x), m in zip(entries, merged, strict=True)]
        inner_contiguous = [m[-1] == 1 for m in merged if m] if self.sizes else []
        # expanded tensors (stride 0) have no say
        self.time_contiguous = sum(t == 1 for *_, t in self.strides) >= sum(inner_contiguous)
        self.step_bytes = sum(x.element_size() for i, x in entries if x.stride(time_dim) and twins.get(i, i) == i)
        policy = sources[HEAD.index("next_policy")]
        self.actions = 0 if policy is None else policy.shape[-1]
        self.grouped = self.time_contiguous and not self.actions
        moving = [(x, m, t) for x, m, t in self.strides if t]
        # rows follow one another; numbers may be read together with those beside a row; rows may be taken as one
        self.flat = self.grouped and all(t == 1 and m in ([], [self.steps]) for _, m, t in moving)
        self.together = self.flat and all(x.element_size() <= 4 and x.data_ptr() & 15 == 0 for x, *_ in moving)
        each_row = sources[HEAD.index("bootstrap")] if behind else None  # may hold one number a row
        unmasked = sources[HEAD.index("mask")] is None
        self.alike = (
            self.together
            and unmasked
            and not any(any(x.stride()) for x, _, t in self.strides if not t and x is not each_row)
        )

    def layouts(self, entries, strung: int, skew: int, ragged: bool):
        """``(strides, layouts)`` of ``entries`` as the kernel has them; ``strung``: steps of rows taken as one."""
        strides, by_tensor = {}, {}
        for x, m, t in self.strides:
            m = [strung] if strung and t else m
            row_align, time_align = math.gcd(16, *m), math.gcd(16, t) if t else 1
            layout = (*(r // row_align for r in m or [0]), *(None,) * (ROW_DIMS - max(1, len(m))), t // time_align)
            nth = strides.setdefault((layout, row_align, time_align), len(strides))
            by_tensor[id(x)] = nth, row_align, time_align, skew if t else 0, ragged and t > 0
        layouts = tuple(by_tensor.get(id(x), (0, 1, 1, 0, False)) for x in entries)
        return tuple(s for layout, *_ in strides for s in layout), layouts


def _neighbours(spec: Spec, sources, kinds, scalar, twins, masked):
    """What is read at a neighbouring step, each once, and where among that each entry is, as the kernel has them."""
    hypers = len(sources) - len(scalar)
    kind_of = dict(zip(range(len(HEAD), len(sources)), (*kinds, *(0 for _ in scalar)), strict=True))
    neighbours, beside = [], []
    for index in (HEAD.index("successor"), *kind_of):
        there = index in twins and not masked and sources[index] is not None
        there = there and (index < hypers or scalar[index - hypers] == 2)
        read = (twins[index], int(kind_of.get(index, 0)), _reads(spec)[0][index]) if there else None
        if there and read not in neighbours:
            neighbours.append(read)
        beside.append(neighbours.index(read) if there else None)
    return tuple(neighbours), tuple(beside)


class _Launch:
    """Everything about a launch but its pointers: built once for a layout, then called."""

    def __init__(
        self,
        spec: Spec,
        shape,
        time_dim,
        sources,
        outputs,
        masked,
        behind,
        kinds,
        dtype,
        device,
        summarise,
        twins,
        meets,
        tile,
    ):
        self.spec, self.device, self.summarise = spec, device, summarise
        outputs = () if summarise else outputs  # a summary's have a layout of their own, [rows, segments]
        exclusive = any(o in spec.looks_ahead for o, x in zip(spec.outputs, outputs, strict=False) if x is not None)
        own_mask = sources[HEAD.index("mask")] is not None and not masked
        entries = _Entries(shape, time_dim, sources, outputs, twins, behind)
        late = self._choose_tile(entries, sources, exclusive, own_mask, tile)
        self._cut(late, meets and dtype == torch.float32)
        block_t, steps, strung = self.tile.block_t, self.steps, self.strung > 1
        group = math.gcd(GROUP, block_t) if entries.grouped else 1
        aligned = math.gcd(16, steps)
        at_once = self.segments == 1 or self.meetings is not None
        skew = self._skew() if entries.flat and group == GROUP and at_once and not strung else 0
        total = entries.rows * entries.steps if entries.rows % self.strung else None
        ragged = self.late > 0 and skew > 0 or total is not None  # some of four neighbours may lie outside
        everything = (*sources, *outputs)
        self.strides, layouts = entries.layouts(everything, steps if strung else 0, skew, ragged)
        along_time = (
            layout[1]
            for x, layout in zip(everything, layouts, strict=True)
            if isinstance(x, Tensor) and x.ndim and x.stride(time_dim) == 1
        )
        scalar = tuple(
            0 if not isinstance(h, Tensor) else 1 if not any(h.stride()) or h.numel() == 1 else 2
            for h in sources[len(sources) - len(spec.hypers) :]
        )
        neighbours, beside = _neighbours(spec, sources, kinds, scalar, twins, masked)
        past_mask = own_mask and (spec.transition or bool(neighbours))
        of_actions = [layouts[HEAD.index(name)] for name in ("next_policy", "next_value")] if entries.actions else []
        whole = self.segments * self.chunks * block_t
        held = self.tile.block_n * block_t * sum(x.element_size() for x in sources if isinstance(x, Tensor))
        self.tail = (
            self.rows,
            steps // aligned,
            (entries.steps, *_divisor(entries.steps), self.strung, total) if strung else None,
            self.chunks,
            *(entries.sizes[1:] + [None] * (2 - len(entries.sizes[1:]))),
            sources[HEAD.index("next_policy")].stride(-1) if entries.actions else None,
            layouts,
            kinds,
            neighbours,
            beside,
            tuple(x is not None for x in outputs),
            scalar,
            spec.coefficients,
            spec.epilogue,
            spec.recurrences,
            spec.reverse,
            group,
            group if skew else math.gcd(group, aligned, *along_time),
            1 if entries.time_contiguous else self.tile.run,
            (2 if self.segments > 1 else 1) if past_mask else 0,
            spec.transition,
            exclusive,
            behind,
            summarise,
            self.fold,
            entries.actions,
            math.gcd(4, entries.actions, *(a for layout in of_actions for a in layout[1:3])) if of_actions else 1,
            tl.float64 if dtype == torch.float64 else tl.float32,
            (whole + skew) * max([1, *(t for *_, t in entries.strides)]) >= INT32,
            aligned,
            skew,
            strung,
            self.rows % self.tile.block_n == 0,
            not skew and total is None and steps == whole,
            max(1, min(self.tile.num_stages, 1 + _shared_memory(device) // held)),
            self.tile.block_n,
            block_t,
        )
        self.skew = skew
        self.compiled = self._fire = None  # by the first launch

    def _choose_tile(self, entries: _Entries, sources, exclusive: bool, masked: bool, tile: Tile | None) -> int:
        """Sets ``tile``, ``strung``, ``rows`` and ``steps``; returns by how many steps rows may begin late."""
        rows, steps, multiprocessors = entries.rows, entries.steps, _multiprocessors(self.device)
        strung = tile.strung if tile else _strung(rows, steps, entries.step_bytes)
        fits = strung <= rows and strung * steps % GROUP == 0 and min(steps, tile.block_t if tile else GROUP) >= GROUP
        self.strung = strung if entries.alike and fits and not self.summarise else 1
        late = 0
        if entries.together and self.strung == 1:
            late = GROUP - math.gcd(GROUP, steps) if tile else _late(rows, steps, multiprocessors)
        self.tile = tile or tile_plan(
            rows,
            steps,
            entries.time_contiguous,
            exclusive=exclusive,
            masked=masked,
            shifted=sum(
                isinstance(sources[i], Tensor) and sources[i].ndim > 0 and sources[i].is_floating_point()
                for i in _reads(self.spec)[0]
            ),
            actions=entries.actions,
            late=late,
            strung=self.strung,
            step_bytes=entries.step_bytes,
            multiprocessors=multiprocessors,
        )
        self.rows, self.steps = -(-rows // self.strung), self.strung * steps
        return late

    def _cut(self, late: int, meets: bool) -> None:
        """Sets ``segments``, the ``chunks`` of each, how they are told of one another, and how ``late`` rows begin."""
        recurrences = self.spec.recurrences
        for self.late in dict.fromkeys((late, 0)):
            chunks = -(-(self.steps + self.late) // self.tile.block_t)
            self.segments = min(self.tile.segments, chunks)
            if self.strung > 1 and (self.segments < chunks or not meets):
                self.segments = 1
            self.chunks = -(-chunks // self.segments)
            cut = self.segments > 1 and recurrences > 0 and not self.summarise
            met = meets and cut and self.chunks == 1
            if self.segments == 1 or met:  # of two launches both have to begin alike
                break
        self.fold = max(16, _power_of_2(self.segments)) if cut else 0  # a scan over fewer does not compile everywhere
        if met:  # no two threads that decide together read the same word: they might see it at different times
            by_warp = self.tile.block_n == 1 and self.fold <= 32  # every warp reads them all, and goes on when it has
            self.fold = 32 if by_warp else max(self.fold, 32 * self.tile.num_warps // self.tile.block_n)
        self.meetings = Meetings(self.device, 2 * recurrences * self.rows * self.segments) if met else None
        self.alone = not cut or met
        self.grid = (-(-self.rows // self.tile.block_n), self.segments, 1)

    def _skew(self) -> int:
        """At multiples of which place in memory chunks begin, not with a row: 0 where they begin with it.

        Rows whose lengths are no multiple of what memory gives at once start anywhere in it.
        """
        steps, chunks = self.steps, self.chunks * self.segments
        worth = self.late or self.rows > 1 and chunks > 1 and steps % GROUP == 0
        for skew in (SECTOR, GROUP) if worth else ():
            within = math.gcd(skew, steps)
            if within < skew and steps + skew - within <= chunks * self.tile.block_t:
                return skew
        return 0

    def __call__(self, sources, outputs, before, initial):
        if self.compiled is None or self.device.type != "cuda":
            meeting = None if self.meetings is None else self.meetings.place()
            self.compiled = _scan.scan_kernel[self.grid](
                sources, self.strides, outputs, before, initial, meeting, *self.tail, num_warps=self.tile.num_warps
            )
            return
        # what Triton specialises on is in the cache's key, so its own look-up is not needed again
        self.run(
            _pointers(sources),
            _pointers(outputs),
            None if before is None else _pointers(before),
            None if initial is None else initial.data_ptr(),
        )

    @property
    def repeatable(self) -> bool:
        """Whether :meth:`run` is all there is to a call."""
        return self.compiled is not None and self.alone

    def run(self, sources, outputs, before, initial):
        """Launch what is compiled on pointers as numbers, on the current stream."""
        if self.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.run(sources, outputs, before, initial)
        if self._fire is None:
            self._fire = _direct_launcher(self.compiled, self.grid)
        meeting = None if self.meetings is None else self.meetings.place().data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        self._fire(stream, (sources, self.strides, outputs, before, initial, meeting, *self.tail))

    def direct(self, sources, outputs, initial):
        """What the driver wants of a launch, or ``None`` where Triton does more for one.

        Args:
            sources, outputs, initial: numbers, ``None``, and a :class:`~._replay.Place` for each pointer.

        Returns:
            ``(function, grid, threads, shared memory, parameters of 8 bytes each, (parameter, place) of the pointers,
            what gives the place to meet at)``.
        """
        metadata = getattr(self.compiled, "metadata", None)
        if metadata is None or TRITON not in LAUNCHED_ALIKE or torch.version.hip is not None or not all(driver()):
            return None
        more = "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"
        if any(getattr(metadata, name, 1) for name in more) or metadata.num_ctas != 1:
            return None
        meeting = None if self.meetings is None else self.meetings.place
        arguments = sources, self.strides, outputs, None, initial, meeting and Place(MEETING), *self.tail
        values, slots = [], []
        for kind, x in parameters(self.compiled.src.signature.values(), arguments):
            if isinstance(x, Place):
                slots.append((len(values), int(x)))
                x = 0
            values.append(bytes(PARAMETER[kind[0] if kind[0] in "*iu" else kind](x)).ljust(8, b"\0"))
        values += [bytes(8)] * 2  # memory for scratch, of which there is none
        threads = 32 * metadata.num_warps
        return self.compiled.function, self.grid, threads, metadata.shared, b"".join(values), tuple(slots), meeting


class Meetings:
    """Where the segments of one plan's launches meet: zeros at first, then what the launch before left.

    Launches that can run at once never share a place: every stream has its own, every call in a CUDA graph too.
    """

    WORDS = 2**17  # that are made ready at a time
    lock = threading.Lock()
    ready: dict[torch.device, Tensor] = {}
    kept: list[Tensor] = []  # a graph may be replayed at any time, a launch under way on any stream

    def __init__(self, device: torch.device, words: int):
        self.device, self.words = device, words
        self.by_stream: dict[int, Tensor] = {}

    def place(self) -> Tensor:
        cuda = self.device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return self._taken(capturing=True)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index) if cuda else 0
        place = self.by_stream.get(stream)
        if place is None:
            place = self.by_stream[stream] = self._taken()
        return place

    def _taken(self, capturing: bool = False) -> Tensor:
        with self.lock:
            ready = self.ready.get(self.device)
            if ready is None or len(ready) < self.words:
                if capturing:  # the graph will set it to zero whenever it is replayed
                    self.kept.append(torch.zeros(self.words, dtype=torch.long, device=self.device))
                    return self.kept[-1]
                ready = torch.zeros(max(self.words, self.WORDS), dtype=torch.long, device=self.device)
                if self.device.type == "cuda":  # other streams take of it too
                    torch.cuda.current_stream(self.device).synchronize()
                self.kept.append(ready)
            self.ready[self.device] = ready[self.words :]
            return ready[: self.words]


TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2]) if triton else None
LAUNCHED_ALIKE = {(3, 6), (3, 7), (3, 8), (3, 9)}  # versions whose kernels take what :func:`parameters` says
PARAMETER = {"*": ctypes.c_uint64, "i": ctypes.c_int64, "u": ctypes.c_uint64, "fp32": ctypes.c_float,
             "fp64": ctypes.c_double}  # fmt: skip


def parameters(signature, arguments):
    """``(type, argument)`` of all that a compiled kernel is passed but memory for scratch."""
    for kind, x in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from parameters(kind, x)
        elif kind != "constexpr":
            yield kind, x


def _direct_launcher(kernel, grid):
    """``(stream, arguments) -> None`` for a compiled kernel, past Triton's Python where its launcher is one we know."""
    launcher, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    flags = getattr(launcher, "launch_cooperative_grid", None), getattr(launcher, "launch_pdl", None)
    needs_scratch = getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1)
    if TRITON == (3, 6) and not needs_scratch:

        def fire(stream, args):
            launcher.launch(*grid, stream, function, *flags, None, None, metadata, None, None, None, *args)

    else:

        def fire(stream, args):
            launcher(*grid, stream, function, metadata, None, None, None, *args)

    return fire


def apart(outputs, sources):
    """Outputs, with a stand-in for each that lies on a source: a step must not overwrite what its neighbour reads."""
    read = {x.data_ptr() for x in sources if isinstance(x, Tensor)}
    return tuple(o if o is None or o.data_ptr() not in read else torch.empty_like(o) for o in outputs)


def _pointers(entries):
    return tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in entries)


@functools.cache
def _reads(spec: Spec):
    """``({source: shift}, sources)``: what is read at a neighbouring step, and what at the step itself."""
    shifts = {HEAD.index("successor"): 1} if spec.transition else {}
    shifts |= {len(HEAD) + k: shift for k, shift in enumerate(spec.shifts) if shift}
    return shifts, tuple(len(HEAD) + k for k in range(len(spec.names)) if not spec.shifts[k])


_launches: dict[tuple, _Launch] = {}


def launch(
    spec: Spec,
    shape,
    time_dim: int,
    sources,
    outputs,
    *,
    initial,
    masked,
    behind,
    dtype,
    kinds=None,
    summarise=False,
    meets=True,
    tile=None,
):
    """Run ``spec``.

    Args:
        sources: :data:`HEAD`, the inputs and the hypers; tensors of ``shape`` (any strides; where values of all
            actions stand for the taken one's, their last dimension is that of actions), numbers for hypers, ``None``
            where absent.
        outputs: tensors of ``shape`` to be written, ``None`` where not wanted.
        initial: ``x`` beyond the window, one number a row in the order of ``shape``, or ``None`` for 0.
        masked: entries that the spec reads at another step are already those of the valid neighbour.
        behind: the bootstrap holds only behind the last step.
        dtype: of the arithmetic.
        kinds: of the inputs, as the kernel's ``load`` has them; by default numbers and flags.
        summarise: write what each segment does to what enters it, ``(u, w)`` of ``[rows, segments]``.
        meets: whether segments may meet, in memory that outlives the call.
        tile: what to take instead of the :func:`tile_plan`.
    """
    tile = tile or _forced_tile
    initial = None if initial is None else initial.reshape(-1).contiguous()
    layout = tuple(
        (x.dtype, x.stride(), x.shape[-1:], x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else x is None
        for x in (*sources, *outputs, initial)
    )
    device = next(x for x in outputs if x is not None).device
    kinds = spec.flags if kinds is None else kinds
    shifts, others = _reads(spec)
    twins = tuple(next((k for k in others if sources[k] is sources[i]), i) for i in shifts)
    key = (spec, time_dim, shape, layout, twins, masked, behind, kinds, dtype, summarise, device, meets, tile)
    plan = _launches.get(key)
    if plan is None:
        try:
            plan = _Launch(
                spec, shape, time_dim, sources, outputs, masked, behind, kinds, dtype, device, summarise,
                dict(zip(shifts, twins, strict=True)), meets, tile,
            )  # fmt: skip
        except _TooManyRowDimensions:
            return _launch_slices(
                spec, shape, time_dim, sources, outputs, initial=initial, masked=masked, behind=behind, dtype=dtype,
                kinds=kinds, meets=meets,
            )  # fmt: skip
        if len(_launches) >= 4096:
            _launches.clear()
        _launches[key] = plan
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _run(plan, shape, time_dim, sources, outputs, initial, masked, behind, dtype, kinds)
    return _run(plan, shape, time_dim, sources, outputs, initial, masked, behind, dtype, kinds)


def _run(plan: _Launch, shape, time_dim, sources, outputs, initial, masked, behind, dtype, kinds):
    record(plan, sources, outputs, initial)
    if _forced_tile is not None:  # by whatever thread
        not_remembered()
    spec = plan.spec
    if plan.alone:
        return plan(sources, outputs, None, initial)
    # two launches: what each segment does to what enters it, and the answer
    summary = tuple(
        torch.empty((plan.rows, plan.segments), dtype=dtype, device=plan.device) for _ in range(2 * spec.recurrences)
    )
    launch(
        spec, shape, time_dim, sources, summary, initial=None, masked=masked, behind=behind, dtype=dtype, kinds=kinds,
        summarise=True, tile=plan.tile,
    )  # fmt: skip
    plan(sources, outputs, summary, initial)


def _launch_slices(spec, shape, time_dim, sources, outputs, *, initial, masked, behind, dtype, kinds, meets):
    """:func:`launch` for rows of more strided dimensions than the kernel indexes, one slice of the first at a time."""
    dim = next(d for d in range(len(shape)) if d != time_dim and shape[d] > 1)
    rows = math.prod(shape) // shape[time_dim] // shape[dim]
    if initial is not None:
        initial = initial.reshape(math.prod(shape[:dim]), shape[dim], -1)
    for i in range(shape[dim]):
        at = [x.narrow(dim, i, 1) if isinstance(x, Tensor) and x.ndim else x for x in (*sources, *outputs)]
        launch(
            spec,
            (*shape[:dim], 1, *shape[dim + 1 :]),
            time_dim,
            tuple(at[: len(sources)]),
            tuple(at[len(sources) :]),
            initial=None if initial is None else initial[:, i].reshape(rows),
            masked=masked,
            behind=behind,
            dtype=dtype,
            kinds=kinds,
            meets=meets,
        )
