"""Which files a DeepSpeed checkpoint has, and whether all of them are there."""

import re
from dataclasses import dataclass
from pathlib import Path

from jzero.errors import JzeroError

_OPTIMIZER = re.compile(r"(|bf16_|fp16_)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(|zero_pp_rank_(\d+)_)mp_rank_(\d+)_model_states\.pt")
_KINDS = {
    "layer_": "pipeline parallelism or experts",
    "expp_rank_": "experts",
    "expert_": "experts",
}
"""How other files begin, and what wrote them."""


@dataclass(frozen=True)
class Files:
    """The files of one save.

    Attributes:
      folder: the one that is named after the tag.
      stage3: whether each rank has a model file of its own, as at stage 3.
      model: model states; at stage 3 one for each rank, in their order, else one.
      optimizer: optimizer states, one for each rank, in their order; none in the universal format.
      universal: the universal format's folder of a folder for each parameter, or None.
    """

    folder: Path
    stage3: bool
    model: tuple[Path, ...]
    optimizer: tuple[Path, ...]
    universal: Path | None


def find(folder: str | Path) -> Files:
    """The files of a DeepSpeed checkpoint.

    Arguments:
      folder: what `save_checkpoint` made for one tag, or DeepSpeed's converter to its universal
        format; or the folder above, whose file `latest` names the tag.

    Raises:
      JzeroError: files that are missing, each by its name; files of two saves; model, pipeline or
        expert parallelism.
    """
    folder = _tag_folder(Path(folder))
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith("_states.pt"))
    universal = folder / "zero" if (folder / "zero").is_dir() else None
    for name in names:
        for begins, what in _KINDS.items():
            if name.startswith(begins):
                raise JzeroError(f"{folder / name}: is written with {what}, which is not imported")
    models = [m for m in map(_MODEL.fullmatch, names) if m]
    optimizers = [m for m in map(_OPTIMIZER.fullmatch, names) if m]
    for match in (*models, *optimizers):
        if int(match[3]) > 0:
            raise JzeroError(
                f"{folder / match[0]}: is a piece of a model that is split over devices (tensor or "
                f"pipeline parallelism), which is not imported"
            )
    if not models:
        raise JzeroError(f"{folder}: has no *_model_states.pt; is it a DeepSpeed checkpoint?")
    if len({bool(m[1]) for m in models}) > 1:
        raise JzeroError(f"{folder}: has {models[0][0]} and {models[-1][0]}, of two saves")
    if len({m[1] for m in optimizers}) > 1:
        raise JzeroError(f"{folder}: has {optimizers[0][0]} and {optimizers[-1][0]}, of two saves")
    if universal is not None and optimizers:
        raise JzeroError(f"{folder}: has both the folder zero and {optimizers[0][0]}, of two saves")
    if universal is None and not optimizers:
        raise JzeroError(
            f"{folder}: has no *_optim_states.pt, as at stage 0; moments are imported from stages "
            f"1 to 3 alone"
        )
    stage3 = bool(models[0][1])
    by_rank = {int(m[2]): folder / m[0] for m in optimizers}
    model_by_rank = {int(m[2] or 0): folder / m[0] for m in models}
    ranks = max(max(by_rank, default=0), max(model_by_rank)) + 1
    return Files(
        folder,
        stage3,
        _all_ranks(folder, model_by_rank, ranks if stage3 else 1),
        _all_ranks(folder, by_rank, ranks) if by_rank else (),
        universal,
    )


def _tag_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise JzeroError(f"{folder}: no such folder")
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag in ("", "..") or Path(tag).name != tag or not (folder / tag).is_dir():
        raise JzeroError(f"{latest}: names {tag!r}, and there is no such folder beside it")
    return folder / tag


def _all_ranks(folder: Path, found: dict[int, Path], ranks: int) -> tuple[Path, ...]:
    missing = [rank for rank in range(ranks) if rank not in found]
    if missing:
        like = next(iter(found.values())).name
        names = [re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", like) for rank in missing[:5]]
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise JzeroError(
            f"{folder}: {', '.join(names)}{more} missing; there are files of {ranks} ranks"
        )
    return tuple(found[rank] for rank in range(ranks))
