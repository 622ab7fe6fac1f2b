"""The flat partitions of ZeRO's ranks, as the parameters that they are pieces of.

Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one partition a rank.
Stage 3 cuts each parameter into a piece a rank, and lays a rank's pieces end to end. What rounds a
partition up is no parameter's, and may be anything.

deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, of 0.19.8.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from jzero.checkpoint.deepspeed.archive import Tensor
from jzero.checkpoint.deepspeed.parameter import MOMENTS, WEIGHT, Parameter, Slice
from jzero.checkpoint.deepspeed.saved import Saved
from jzero.errors import JzeroError

_STATE = "optimizer_state_dict"
Shapes = Mapping[str, tuple[int, ...]]


def trained(model: Saved, ranks: Sequence[Saved], stage3: bool) -> Iterator[Parameter]:
    """The parameters that the optimizer has, with their moments.

    Arguments:
      model: model states, of rank 0 at stage 3.
      ranks: optimizer states of every rank.
      stage3: whether they are of stage 3.

    Raises:
      JzeroError: sizes that do not add up to the last element; ranks that differ; another number
        of ranks than at the save.
    """
    for saved in ranks:
        _check_ranks(saved, len(ranks))
    weights = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
    groups = len(model.get(list, "param_shapes"))
    for saved in ranks:
        if len(saved.get(list, _STATE, weights)) != groups:
            raise JzeroError(f"{saved.path}: does not have the {groups} groups of {model.path}")
    for group in range(groups):
        shapes = model.shapes("param_shapes", group)
        tensors = [_tensors(saved, group, weights, stage3) for saved in ranks]
        for one, other in pairwise(tensors):
            if one.keys() != other.keys():
                raise JzeroError(f"{ranks[0].path.parent}: ranks differ in what group {group} has")
        cut = (_stage_3 if stage3 else _flat)(shapes, ranks, tensors, group)
        steps = _steps(ranks, group, stage3) if MOMENTS[0] in tensors[0] else None
        for name, bounds in cut.items():
            slices = {
                what: tuple(Slice(tensors[rank][what], start, stop) for rank, start, stop in bounds)
                for what in tensors[0]
            }
            yield Parameter(name, shapes[name], slices, steps)


def piece(size: int, rank: int, ranks: int) -> int:
    """Elements of a rank's piece of one parameter at stage 3, without padding.

    Example:
      >>> [piece(10, rank, 4) for rank in range(4)]
      [3, 3, 3, 1]
    """
    each = -(-size // ranks)
    return min(each, max(0, size - rank * each))


Bounds = list[tuple[int, int, int]]  # rank, and of its tensor the first element and the end


def _flat(
    shapes: Shapes, ranks: Sequence[Saved], tensors: Sequence[Mapping[str, Tensor]], group: int
) -> dict[str, Bounds]:
    """Where each parameter is at stages 1 and 2."""
    paddings = [saved.get(int, _STATE, "group_paddings", group) for saved in ranks]
    # Weights come without the padding, but not from the optimizer class without a `zero_stage`.
    stripped = ranks[0].find(_STATE, "zero_stage") is not None
    lengths = {
        held[WEIGHT].size + (padding if stripped else 0)
        for held, padding in zip(tensors, paddings, strict=True)
    }
    each = max(lengths)
    gaps = ranks[0].find(_STATE, "param_alignment_paddings", group)
    found, begin = {}, 0
    for index, (name, shape) in enumerate(shapes.items()):
        end = begin + math.prod(shape)
        bounds = (
            (rank, max(begin - rank * each, 0), min(end - rank * each, each))
            for rank in range(len(ranks))
        )
        found[name] = [(rank, start, stop) for rank, start, stop in bounds if start < stop]
        begin = end
        if gaps is not None:  # since 0.19, and rarely anything but 0
            begin += ranks[0].get(int, _STATE, "param_alignment_paddings", group, index)
    needed = [min(each, max(0, begin - rank * each)) for rank in range(len(ranks))]
    fits = all(
        tensor.size in (each, need)
        for held, need in zip(tensors, needed, strict=True)
        for tensor in held.values()
    )
    if len(lengths) > 1 or begin + sum(paddings) != each * len(ranks) or not fits:
        _refuse_sizes(ranks, group, begin, tensors)
    return found


def _stage_3(
    shapes: Shapes, ranks: Sequence[Saved], tensors: Sequence[Mapping[str, Tensor]], group: int
) -> dict[str, Bounds]:
    """Where each parameter is at stage 3."""
    found, begin = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        pieces = [piece(size, rank, len(ranks)) for rank in range(len(ranks))]
        found[name] = [(rank, begin, begin + n) for rank, n in enumerate(pieces) if n]
        begin += pieces[0]
    if any(tensor.size != begin for held in tensors for tensor in held.values()):
        _refuse_sizes(ranks, group, begin * len(ranks), tensors)
    return found


def _refuse_sizes(
    ranks: Sequence[Saved], group: int, size: int, tensors: Sequence[Mapping[str, Tensor]]
) -> NoReturn:
    there = {what: sum(held[what].size for held in tensors) for what in tensors[0]}
    raise JzeroError(
        f"{ranks[0].path.parent}: the ranks' partitions of group {group} do not add up to its "
        f"parameters, {size:,} elements: there are {there}"
    )


def _check_ranks(saved: Saved, ranks: int) -> None:
    if saved.find(_STATE, "ds_zero_partition_groups") is not None:
        raise JzeroError(f"{saved.path}: is written with experts, which is not imported")
    count = saved.find(_STATE, "partition_count")
    counts = count if isinstance(count, list) else [count]  # one for each group
    if any(each != ranks for each in counts):
        raise JzeroError(
            f"{saved.path}: was saved by {', '.join(map(str, counts))} ranks (by group), but "
            f"{saved.path.parent} has the optimizer states of {ranks}: some are missing, or of "
            f"another save"
        )


def _tensors(saved: Saved, group: int, weights: str, stage3: bool) -> dict[str, Tensor]:
    """A rank's flat tensors of a group: the weights, and the moments if it has any."""
    found = {WEIGHT: saved.get(Tensor, _STATE, weights, group)}
    for what in MOMENTS:
        moment = saved.find(*_state_of(saved, group, stage3), what)
        if isinstance(moment, Tensor):
            found[what] = moment
    return found


def _state_of(saved: Saved, group: int, stage3: bool) -> tuple[str | int, ...]:
    """The keys of the optimizer's own state of a group."""
    if stage3:
        return (_STATE, "optimizer_state_dict", "state", group)
    if isinstance(saved.find(_STATE, "base_optimizer_state"), list):  # `elastic_checkpoint`
        return (_STATE, "base_optimizer_state", group)
    return (_STATE, "base_optimizer_state", "state", group)


def _steps(ranks: Sequence[Saved], group: int, stage3: bool) -> int:
    """Adam's steps: in the state or, from DeepSpeed's own Adam, in the parameter groups."""
    found: set[int | None] = set()
    for saved in ranks:
        keys = _state_of(saved, group, stage3)
        steps = saved.steps(*keys, "step")
        found |= {steps} if steps is not None else group_steps(saved, *keys[:2])
    [steps, *others] = found or {None}
    if steps is None or others:
        raise JzeroError(
            f"{ranks[0].path.parent}: the ranks' steps of group {group} are "
            f"{', '.join(map(str, found))}: of two saves, or of an optimizer that is not Adam"
        )
    return steps


def group_steps(saved: Saved, *keys: str | int) -> set[int | None]:
    """The steps that an optimizer's parameter groups tell."""
    groups = saved.get(list, *keys, "param_groups")
    return {saved.steps(*keys, "param_groups", index, "step") for index in range(len(groups))}
