"""Two processes of four devices train as one process of eight does."""

from pathlib import Path

import numpy as np
from models import distance
from processes import finish, started

WORKER = Path(__file__).with_name("process_worker.py")


def together(processes: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """What each process saw, once all have ended."""
    outs = [folder / f"{processes}-{process}.npz" for process in range(processes)]
    with started(WORKER, [[out] for out in outs], devices=8 // processes) as running:
        finish(running)
    return [dict(np.load(out)) for out in outs]


def test_two_processes_train_as_one(tmp_path):
    (want,) = together(1, tmp_path)
    first, second = together(2, tmp_path)
    assert first.keys() == second.keys() == want.keys()
    for name in want:
        assert np.array_equal(first[name], second[name]), name
        bound = 5e-3 if name.startswith("nnx-2") else 1e-5
        assert distance(first[name], want[name]) < bound, name
