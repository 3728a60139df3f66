"""Estimators as TorchRL transforms: in a replay buffer, at extend or at sample, and for batches of slices."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import ReplayBuffer, TensorStorage
from torchrl.envs import EnvBase, Transform

from .estimators import MissingEntryError, _seams

__all__ = ["ValueEstimatorTransform"]


class ValueEstimatorTransform(Transform):
    """An estimator in a replay buffer.

    At extend, the estimator sees what the buffer is given, ``[*B, T]``, and its results are stored. At sample, it sees
    what the sampler returns. A slice sampler returns its slices end to end, ``[slices * T]``, and marks their ends only
    after the transforms ran: with ``slice_len`` or ``num_slices``, each slice is a row of its own, whose last step is
    the window's edge, and the batch is flat again afterwards. Padded trajectories, ``[N, T]``, need neither: their mask
    is read by the estimator. On its own the transform is a callable for a collector's ``postproc``; workers that were
    concatenated along time are slices too.

    Slices of unequal lengths (``strict_length=False``) are no rows. Call the estimator on the sampled batch instead,
    where ``("next", "done")`` marks the ends of slices, and ``("collector", "mask")`` the padding.

    Args:
        estimator (TensorDictModuleBase): any estimator, or a sequence that ends in one.

    Keyword Args:
        at (str): ``"extend"`` or ``"sample"``.
        slice_len (int, optional): steps per slice, at sample. 1 for single transitions.
        num_slices (int, optional): slices per batch, at sample.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
        >>> from rl_triton_td import GAE, ValueEstimatorTransform
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(100),
        ...     sampler=SliceSampler(slice_len=5),
        ...     transform=ValueEstimatorTransform(GAE(gamma=0.99, lmbda=0.95), at="sample", slice_len=5),
        ...     batch_size=20,
        ... )
        >>> value, flag = torch.zeros(50, 1), torch.zeros(50, 1, dtype=torch.bool)
        >>> after = {"state_value": value, "reward": value + 1, "done": flag, "terminated": flag}
        >>> ids = {"traj_ids": torch.zeros(50, dtype=torch.long)}
        >>> indices = buffer.extend(TensorDict({"state_value": value, "next": after, "collector": ids}, [50]))
        >>> buffer.sample()["advantage"].shape
        torch.Size([20, 1])
    """

    def __init__(
        self,
        estimator: TensorDictModuleBase,
        *,
        at: str,
        slice_len: int | None = None,
        num_slices: int | None = None,
    ):
        if at not in ("extend", "sample"):
            raise ValueError(f'at must be "extend" or "sample", got {at!r}.')
        if slice_len is not None and num_slices is not None:
            raise ValueError("slice_len and num_slices exclude each other: one follows from the other.")
        for name, number in (("slice_len", slice_len), ("num_slices", num_slices)):
            if number is not None and at == "extend":
                raise ValueError(f'{name} is for at="sample": a buffer is extended with whole rows, [*B, T].')
            if number is not None and number < 1:
                raise ValueError(f"{name} must be positive, got {number}.")
        if at == "sample" and (slice_len or num_slices) and getattr(estimator, "time_dim", None) not in (None, -1, 1):
            raise ValueError(f"Slices are rows, with time last, but the estimator has time_dim={estimator.time_dim}.")
        super().__init__()
        self.estimator, self.at, self.slice_len, self.num_slices = estimator, at, slice_len, num_slices

    # read and written by forward at sample, by inv at extend; TorchRL's setters only ever see None
    in_keys = property(lambda self: self.estimator.in_keys if self.at == "sample" else [])
    out_keys = property(lambda self: self.estimator.out_keys if self.at == "sample" else [])
    in_keys_inv = property(lambda self: self.estimator.in_keys if self.at == "extend" else [])
    out_keys_inv = property(lambda self: self.estimator.out_keys if self.at == "extend" else [])

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.estimator(tensordict) if self.at == "extend" else tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """At sample: write the estimator's results into the batch. At extend: check that they were stored.

        Raises:
            MissingEntryError: the storage had been initialised without the results, and dropped them.
            ValueError: the batch is not made of slices as they were announced.
        """
        if self.at == "extend":
            dropped = [key for key in self.estimator.out_keys if tensordict.get(key, None) is None]
            if dropped:
                raise MissingEntryError(
                    f"The storage dropped {', '.join(map(repr, dropped))}: it was initialised without. Give the buffer "
                    "its transform before its first data, or call declare(buffer) on the transform before extending it."
                )
            return tensordict
        if tensordict.batch_dims != 1:
            if self.slice_len not in (None, tensordict.shape[-1]):
                raise ValueError(f"Slices of {self.slice_len} steps do not fit a batch of {tuple(tensordict.shape)}.")
            return self.estimator(tensordict)
        steps = len(tensordict)
        if self.slice_len is None and self.num_slices is None:
            raise ValueError(
                f"A flat batch of {steps} steps says not where one slice ends and the next begins. Give the transform "
                "the sampler's slice_len or num_slices (slice_len=1 for single transitions, num_slices=1 for one row)."
            )
        length = self.slice_len or max(steps // self.num_slices, 1)
        fits = steps % length == 0 and self.num_slices in (None, steps // length)
        if fits:
            rows = tensordict.reshape(steps // length, length)
            done = rows.get(("next", "done"), None)
            fits = done is None or not _seams(rows, done, None, 1)
        if not fits:
            wanted = f"slices of {length} steps" if self.slice_len else f"{self.num_slices} slices of one length"
            raise ValueError(
                f"A batch of {steps} steps is not made of {wanted}. Where slices differ in length "
                '(strict_length=False), call the estimator on the sampled batch: there ("next", "done") marks the ends '
                "of slices."
            )
        return tensordict.update(self.estimator(rows).reshape(steps))

    def declare(self, buffer: ReplayBuffer) -> ReplayBuffer:
        """Make room for the estimator's results in a buffer whose storage is initialised already.

        Memory-mapped and shared storages take no new entries, and drop them in silence. A storage that is not yet
        initialised needs no such call: the first extend, or a collector's, declares all entries. Before a collector's
        workers start.
        """
        storage = buffer.storage
        if not getattr(storage, "initialized", False):
            return buffer
        if not isinstance(storage, TensorStorage) or not isinstance(storage._storage, TensorDictBase):
            raise TypeError(f"{type(storage).__name__} holds no tensordict that entries can be declared in.")
        stored = storage._storage
        known = set(stored.keys(True, True))
        for key, entry in self.estimator(stored[:1].clone()).items(True, True):
            if key in known:
                continue
            shape = torch.Size([stored.shape[0], *entry.shape[1:]])
            if stored.is_memmap():
                stored.make_memmap(key, shape, dtype=entry.dtype)
            else:
                room = entry.new_zeros(shape)
                with stored.unlock_():
                    stored.set(key, room.share_memory_() if stored.is_shared() else room)
        storage._storage_keys = None  # TorchRL's list of what a locked storage takes
        return buffer

    def set_container(self, container: Transform | EnvBase) -> None:
        if isinstance(container, EnvBase) or container.parent is not None:
            raise ValueError(f"{type(self).__name__} goes into a replay buffer or a collector's postproc, not an env.")
        super().set_container(container)
