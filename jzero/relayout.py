"""What a loss tells about a model's layer axes, and moving a state that was laid out without it."""

from typing import Any

import jax

from jzero.divergence import check_uniform
from jzero.errors import JzeroError
from jzero.gradient import Region
from jzero.layout import Layout, is_leaf
from jzero.models import removed_axes
from jzero.padding import pad, unpad
from jzero.partition import STAGES, Leaf
from jzero.probe import reads_in, trace
from jzero.setup import Setup
from jzero.state import State


def discover(region: Region, variables: Any, batch: Any) -> dict[str, tuple[int, ...]]:
    """Layer axes that the loss shows and the layout does not know: path -> axes.

    Arguments:
      region: the loss function and the layout.
      variables: the model's other variables, abstract.
      batch: a global batch, arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      JzeroError: a leaf is read in a shape that no taking away of axes explains, or only on some
        devices.
    """
    layout, found = region.layout, {}
    jaxpr = trace(region.trace, region.params, variables, batch)
    check_uniform(jaxpr, batch, variables, reads=STAGES[layout.stage].gradients)
    for path, read in reads_in(jaxpr, region.params).items():
        leaf, shape = layout.leaves[path], read.shape
        axes = read.gone or removed_axes(leaf.array.shape, shape)
        if axes is None:
            raise JzeroError(
                f"{path} of shape {leaf.array.shape} is read as {shape}: jzero knows layers taken "
                f"from a stack, not reshaped weights; read the whole leaf first (jzero.gather)"
            )
        if axes and axes != leaf.array.layer_axes:
            found[path] = axes
    return found


def relayout(state: State | None, old: Layout, setup: Setup) -> State | None:
    """A state moved from one layout to another, leaf by leaf; its old arrays are given up."""
    if state is None:
        return None
    new, want = setup.layout, setup.abstract_state()
    structures = [jax.tree.structure(x.opt_leaves, is_leaf=is_leaf) for x in (old, new)]
    if structures[0] != structures[1]:
        raise JzeroError(
            "the optimizer keeps another state once the model's layer axes are known; tell them "
            "beforehand with zero.init(..., layer_axes=...)"
        )

    def move(before: Leaf, after: Leaf, x, target):
        if before == after:
            return x

        def one(x):
            x = unpad(before, x) if x.shape == before.stored_shape else x
            return pad(after, x) if target.shape == after.stored_shape else x

        donated = (0,) if x.shape == target.shape else ()  # another shape cannot take the buffer
        return jax.jit(one, out_shardings=target.sharding, donate_argnums=donated)(x)

    def each(arrays: dict[str, jax.Array], targets):
        return {p: move(old.leaves[p], new.leaves[p], x, targets[p]) for p, x in arrays.items()}

    return State(
        step=state.step,
        skipped=state.skipped,
        params=each(state.params, want.params),
        master=each(state.master, want.master),
        opt_state=jax.tree.map(
            move, old.opt_leaves, new.opt_leaves, state.opt_state, want.opt_state, is_leaf=is_leaf
        ),
        variables=state.variables,
        rng=state.rng,
        scale=state.scale,
    )
