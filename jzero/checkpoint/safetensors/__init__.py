"""Safetensors files, out of checkpoints and into them."""

from jzero.checkpoint.safetensors.export import Exported, export_safetensors
from jzero.checkpoint.safetensors.importing import Imported, import_safetensors

__all__ = ["Exported", "Imported", "export_safetensors", "import_safetensors"]
