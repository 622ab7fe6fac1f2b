"""One of several processes that train together; `test_processes.py` starts them.

python process_worker.py COORDINATOR PROCESSES PROCESS OUT.npz
"""

import jax
import numpy as np
from jax.experimental import multihost_utils
from models import OPTIMIZERS, Net, make_batch
from processes import join

import jzero
from jzero.paths import flatten

RUNS = {
    "nnx-2": (Net("nnx"), {"stage": 2, "precision": "bf16"}),
    "plain-3": (Net("plain", layers=8, vocab=50, width=18), {"stage": 3, "accumulation": 2}),
}


def train(net: Net, config: dict) -> dict[str, np.ndarray]:
    """Weights after three steps, each process feeding its own rows; also the losses."""
    zero = jzero.Zero(**config)
    state = zero.init(net.init, OPTIMIZERS["adamw"](), sample=net.sample)
    step, evaluate = zero.train_step(net.loss), zero.eval_step(net.loss)
    share = 32 // jax.process_count()
    mine = slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def loader():
        for i in range(3):
            yield jax.tree.map(lambda x: x[mine], make_batch(i, net.vocab))

    losses = []
    for batch in zero.batches(loader()):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    held_out = jax.tree.map(lambda x: x[mine], make_batch(9, net.vocab))
    losses.append(float(evaluate(state, held_out)["loss"]))
    whole = {
        path: np.asarray(multihost_utils.process_allgather(x, tiled=True))
        for path, x in flatten(zero.params(state)).items()
    }
    return whole | {"losses": np.array(losses)}


if __name__ == "__main__":
    (out,) = join()
    found = {}
    for name, (net, config) in RUNS.items():
        found |= {f"{name}:{path}": x for path, x in train(net, config).items()}
    np.savez(out, **found)
    jax.distributed.shutdown()
