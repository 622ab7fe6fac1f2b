"""DeepSpeed's ZeRO checkpoints, into those of jzero."""

from jzero.checkpoint.deepspeed.convert import Imported, import_deepspeed

__all__ = ["Imported", "import_deepspeed"]
