"""A loop whose step is compiled once for all tests; the network of tests/training serves too."""

import sys
from pathlib import Path

import optax
import pytest
from loops import Net, Rows, loss_fn, make_zero

import jzero

sys.path.append(str(Path(__file__).parent.parent / "training"))


@pytest.fixture(scope="session")
def trained():
    """One compiled step for all tests: states are made anew, the setup is shared."""
    zero = make_zero(2, stage=3)
    tx = optax.adam(1e-2)
    zero.setup_for(Net, tx)
    return zero, tx, zero.train_step(loss_fn)


class Steps:
    """A loop over the shared step."""

    def __init__(self, trained, folder, **keywords):
        self.zero, tx, self.step = trained
        setup = self.zero.setup
        self.state = self.zero.init(Net, tx)
        self.zero.setup = setup  # the same as before, for which the step is compiled
        self.rows = Rows()
        self.checkpoints = self.zero.checkpointer(folder, **keywords)

    def advance(self) -> jzero.State:
        self.state, _ = self.step(self.state, next(self.rows))
        return self.state

    def save(self, **keywords) -> bool:
        return self.checkpoints.save(self.state, self.rows.position, **keywords)

    def run(self, count, **keywords) -> list[bool]:
        said = []
        for _ in range(count):
            self.advance()
            said.append(self.save(**keywords))
        return said


@pytest.fixture
def steps(trained, tmp_path):
    made = []

    def make(folder="run", **keywords):
        made.append(Steps(trained, tmp_path / folder, **keywords))
        return made[-1]

    yield make
    for loop in made:
        loop.checkpoints.close()
