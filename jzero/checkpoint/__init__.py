"""Checkpoints that fit any stage and any number of devices."""

from jzero.checkpoint.choice import RestoreReport
from jzero.checkpoint.damage import DamagedCheckpoint
from jzero.checkpoint.entries import PARTS, Entry, entries
from jzero.checkpoint.facts import facts_of
from jzero.checkpoint.host_leaves import write_leaves
from jzero.checkpoint.manifest import Facts, Manifest
from jzero.checkpoint.restore import Restored, restore
from jzero.checkpoint.safetensors import (
    Exported,
    Imported,
    export_safetensors,
    import_safetensors,
)
from jzero.checkpoint.save import agree_nonce, save_step
from jzero.checkpoint.snapshot import Snapshot, snapshot
from jzero.checkpoint.store import Reader
from jzero.checkpoint.verify import complete_before, verify

__all__ = [
    "PARTS",
    "DamagedCheckpoint",
    "Entry",
    "Exported",
    "Facts",
    "Imported",
    "Manifest",
    "Reader",
    "RestoreReport",
    "Restored",
    "Snapshot",
    "agree_nonce",
    "complete_before",
    "entries",
    "export_safetensors",
    "facts_of",
    "import_safetensors",
    "restore",
    "save_step",
    "snapshot",
    "verify",
    "write_leaves",
]
