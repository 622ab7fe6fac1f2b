"""A program that saves at its second step and then ends in some way; `test_checkpointer.py`.

python program.py HOW FOLDER
"""

import os
import sys
import threading
import time
from pathlib import Path

from loops import Loop

from jzero.checkpoint import writer
from jzero.errors import RunFailed

how, folder = sys.argv[1], Path(sys.argv[2])
save_step = writer.save_step
started = threading.Event()


def slow(root, step, *args, **keywords):
    started.set()
    time.sleep(0.0 if how == "exit at once" else 0.5)  # the main thread is at its end by then
    if "full disk" in how:
        raise RunFailed(f"step {step} was not saved: no space")
    return save_step(root, step, *args, **keywords)


writer.save_step = slow
loop = Loop(folder, every=2)
loop.advance()
loop.advance()
started.wait()
if how == "exit at once":
    loop.checkpoints.wait()
    loop.advance()
    os._exit(3)
