"""The batch identity: train batch = micro-batch x accumulation x data-parallel size."""

from collections.abc import Mapping
from dataclasses import dataclass

from jzero.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """Sizes in samples: `train` per optimizer step, `micro` per device and micro-batch.

    `train` and `micro` are None where the first batch decides them.
    """

    train: int | None
    micro: int | None
    accumulation: int


def resolve(
    train: int | None,
    micro: int | None,
    accumulation: int | None,
    size: int,
    axes: Mapping[str, int],
    optional: bool,
) -> Batch:
    """Complete the batch sizes from those given; nothing is ever rounded.

    Arguments: the three sizes, None where not given; `size` of the data-parallel group and the
    mesh `axes` that make it up; `optional`, whether the first batch may decide.

    Raises: `ConfigError` with all four numbers, the axes, which keys were given, and what to
    change.

    Follows DeepSpeed's table (`_set_batch_related_parameters`) without its floor divisions.
    """

    def fail(problem: str, fix: str) -> ConfigError:
        sizes = {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
        }
        numbers = " ".join(
            f"{name}={v if v is not None else '(unset)'}" for name, v in sizes.items()
        )
        given = [name for name, v in sizes.items() if v is not None]
        made = " x ".join(f"{name}={n}" for name, n in axes.items()) or "one device"
        return ConfigError(
            f"train_batch_size: {problem}: {numbers} "
            f"data-parallel size={size} (mesh axes: {made}); "
            f"given: {', '.join(given) or 'none of them'}; {fix}"
        )

    if train is None and micro is None:
        if optional:
            return Batch(None, None, accumulation or 1)
        raise fail(
            "cannot be inferred", "give train_batch_size or train_micro_batch_size_per_gpu as well"
        )
    if train is None:
        assert micro is not None
        steps = accumulation or 1
        return Batch(micro * steps * size, micro, steps)
    if micro is not None and accumulation is not None:
        product = micro * accumulation * size
        if train != product:
            raise fail(
                f"{train} is not {micro} x {accumulation} x {size} = {product}",
                f"set train_batch_size to {product} or remove one of the three keys",
            )
        return Batch(train, micro, accumulation)
    # One size is missing: what is known must divide the batch.
    known = micro if micro is not None else accumulation or 1
    unit = known * size
    if train % unit:
        low = max(1, train // unit) * unit
        near = f"{low} or {low + unit}"
        raise fail(
            f"{train} is not a multiple of {known} x {size} = {unit}",
            f"set train_batch_size to a multiple of {unit} (such as {near}) or use other devices",
        )
    if micro is not None:
        return Batch(train, micro, train // unit)
    return Batch(train, train // unit, accumulation or 1)
