"""One of two processes that train until they are told to end; `test_stop.py` starts them.

python stop_worker.py COORDINATOR PROCESSES PROCESS FOLDER
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from processes import join

import jzero
from jzero.checkpoint import folders, retention
from jzero.errors import JzeroError, RunFailed

(folder,) = join()
zero = jzero.Zero(stage=3)
state = zero.init(lambda key: {"w": jax.random.normal(key, (6, 5))}, optax.adam(1e-2))
step = zero.train_step(
    lambda params, batch, rng: jnp.mean((batch["x"] @ jzero.gather(params["w"])) ** 2)
)
batch = {"x": jnp.ones((2, 6))}

# A run that goes back: no process goes on before the later steps are put away.
set_aside = retention.set_aside
retention.set_aside = lambda *given: time.sleep(1) or set_aside(*given)
with zero.checkpointer(Path(folder, "back"), timeout=10) as checkpoints:
    for _ in range(3):
        state, _ = step(state, batch)
        checkpoints.save(state, force=True)
    state = checkpoints.restore(1).state
    checkpoints.set_aside(after=0)
    published = folders.published
    if jax.process_index():  # a network file system may show the folder as it was before
        folders.published = lambda root: [1, 2, 3]
    assert checkpoints.save(state, force=True)
folders.published = published

# A folder where another run writes: no process waits for the one that found out.
try:
    with zero.checkpointer(Path(folder, "taken")):
        pass
except (JzeroError, RunFailed) as error:
    print("refused:", error)

with zero.checkpointer(folder, every=4, timeout=60) as checkpoints:
    while not checkpoints.stopping:
        if int(state.step) == 1000:
            sys.exit("nothing stopped it")
        state, _ = step(state, batch)
        time.sleep(0.02 * (1 + jax.process_index()))
        checkpoints.save(state, jax.process_index())
    print("stopped after", int(state.step))
jax.distributed.shutdown()
