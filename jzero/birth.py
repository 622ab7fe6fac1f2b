"""The first state: born sharded, or made from weights that are there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.layout import MASTER, Layout, struct
from jzero.models.model import Model
from jzero.padding import pad, unpad
from jzero.partition import Leaf
from jzero.paths import flatten
from jzero.precision import Scaling
from jzero.state import State
from jzero.update import Update


def abstract_state(layout: Layout, variables: Any, scaling: Scaling) -> State:
    """The state's shapes, dtypes and shardings; no array exists.

    Arguments:
      layout: where everything lives.
      variables: the model's other variables, arrays or `jax.ShapeDtypeStruct`s.
      scaling: the loss scale's settings.
    """
    whole = layout.mesh.whole

    def placed(x) -> Any:
        return struct(x.shape, str(x.dtype), whole)

    count = placed(jax.ShapeDtypeStruct((), jnp.int32))
    params: Any = layout.parameters()
    master: Any = layout.masters()
    rng = jax.eval_shape(lambda: jax.random.key(0))
    return State(
        step=count,
        skipped=count,
        params=params,
        master=master,
        opt_state=layout.optimizer_state(),
        variables=jax.tree.map(placed, variables),
        rng=placed(rng),
        scale=jax.tree.map(placed, jax.eval_shape(scaling.init)),
    )


def born(model: Model, update: Update, scaling: Scaling, seed: int, like: State) -> State:
    """A state whose weights the model makes: no device ever holds a whole sharded leaf.

    Arguments:
      model: makes the weights; XLA makes each device's piece on that device.
      update, scaling: as the step has them.
      seed: of the weights and of the run.
      like: the abstract state.
    """

    def make(key) -> State:
        params, variables = model.build(key)
        leaves = update.layout.leaves
        stored = {path: pad(leaves[path], x) for path, x in flatten(params).items()}
        return _assemble(update, scaling, stored, variables, key)

    return _run(make, like, jax.random.key(seed))


def placed(model: Model, update: Update, scaling: Scaling, seed: int, like: State) -> State:
    """A state from weights that are there: each device takes its own piece, leaf by leaf.

    Arguments: as `born`; the weights are the model's.
    """
    assert model.weights is not None
    params, variables = model.weights
    flat, layout, pieces = flatten(params), update.layout, {}
    for path, leaf in layout.leaves.items():
        want = layout.master(leaf) if leaf.array.trained else layout.parameter(leaf)
        pieces[path] = place_weight(leaf, flat[path], want)
    variables = jax.tree.map(lambda x: jax.device_put(x, layout.mesh.whole), variables)

    def make(pieces, variables, key) -> State:
        return _assemble(update, scaling, pieces, variables, key)

    return _run(make, like, pieces, variables, jax.random.key(seed))


def _run(make, like: State, *args) -> State:
    shardings = jax.tree.map(lambda x: x.sharding, like)
    return break_aliases(jax.jit(make, out_shardings=shardings)(*args))


def place_weight(leaf: Leaf, x: Any, want: jax.ShapeDtypeStruct) -> jax.Array:
    """One weight as stored: each device gets no more than its own piece."""
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        return jax.device_put(x, want.sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(
            lambda x: (pad(leaf, x) if x.shape != want.shape else x).astype(want.dtype),
            out_shardings=want.sharding,
        )(x)

    host = np.asarray(x)  # one leaf at a time; no device holds it whole

    def piece(index):
        inside = tuple(
            slice(i.start or 0, min(i.stop or n, n)) for i, n in zip(index, host.shape, strict=True)
        )
        part = host[inside].astype(want.dtype)
        size = [(i.stop or n) - (i.start or 0) for i, n in zip(index, want.shape, strict=True)]
        widths = [(0, s - n) for s, n in zip(size, part.shape, strict=True)]
        return np.pad(part, widths) if leaf.is_padded else part

    return jax.make_array_from_callback(want.shape, want.sharding, piece)


def _assemble(update: Update, scaling: Scaling, stored, variables, key) -> State:
    """The state from weights in their stored shapes, whatever their dtype."""
    layout = update.layout
    masters = {p: stored[p].astype(MASTER) for p in layout.trained}

    def parameter(leaf: Leaf):
        x = stored[leaf.path]
        if leaf.is_padded and not leaf.shard_parameter:
            x = unpad(leaf, x)
        want = layout.parameter(leaf)
        return x if x.dtype == want.dtype else x.astype(want.dtype)

    return State(
        step=jnp.int32(0),
        skipped=jnp.int32(0),
        params={p: parameter(x) for p, x in layout.leaves.items() if layout.has_parameter(x)},
        master={p: masters[p] for p, x in layout.leaves.items() if layout.has_master(x)},
        opt_state=update.init(masters),
        variables=variables,
        rng=jax.random.fold_in(key, 0x7A65),  # apart from the streams that made the weights
        scale=scaling.init(),
    )


def break_aliases(state: State) -> State:
    """Copies arrays that share a buffer: donating one buffer twice crashes or hangs.

    Some Optax transformations return their parameters as their first state.
    """
    seen: set[int] = set()

    def one(x):
        if not isinstance(x, jax.Array) or not x.size or not x.addressable_shards:
            return x
        data = x.addressable_shards[0].data
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        pointer = data.unsafe_buffer_pointer()
        if pointer in seen:
            return jnp.copy(x)
        seen.add(pointer)
        return x

    return jax.tree.map(one, state)
