"""How single values are read: the types that the schema's keys are annotated with.

Each type accepts what people write for it in JSON or Python (5e8 or "2" for a whole number, "true"
for a flag, a NumPy scalar for a number) and refuses everything else with a phrase that says what is
allowed.
"""

import math
import os
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

# Spellings of the three compute dtypes, as DeepSpeed and NumPy write them.
DTYPES = {
    "float32": ("fp32", "float32", "float", "torch.float32", "torch.float"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
    "float16": ("fp16", "float16", "half", "torch.float16", "torch.half"),
}
_DTYPE_NAMES = {spelling: name for name, spellings in DTYPES.items() for spelling in spellings}


def not_allowed(allowed: str) -> PydanticCustomError:
    """The error of a value reader: `allowed` completes the sentence "found ...; allowed: ..."."""
    return PydanticCustomError("jzero_value", "{allowed}", {"allowed": allowed})


def plain(value: Any) -> Any:
    """A NumPy scalar as the Python number it holds; anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def read_flag(value: Any) -> bool:
    """A boolean, also from the text "true" or "false"; nothing else is ever truthy."""
    value = plain(value)
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text not in ("true", "false"):
        raise not_allowed("true or false")
    return text == "true"


def read_number(value: Any, allowed: str) -> float | int:
    """A finite number, also from text; a boolean is not a number."""
    value = plain(value)
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise not_allowed(allowed) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise not_allowed(allowed)
    if isinstance(value, float) and not math.isfinite(value):
        raise not_allowed(f"{allowed}; NaN and infinity are not")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise not_allowed(f"{allowed}, below 2**63")
    return value


def _bounds(least: float | None, above: float | None, most: float | None) -> str:
    parts = [
        f"{word} {bound:g}"
        for word, bound in (("at least", least), ("above", above), ("at most", most))
        if bound is not None
    ]
    return " " + " and ".join(parts) if parts else ""


def number(
    least: float | None = None, above: float | None = None, most: float | None = None
) -> Callable[[Any], float]:
    """A reader of finite numbers within bounds."""
    allowed = f"a number{_bounds(least, above, most)}"

    def read(value: Any) -> float:
        result = float(read_number(value, allowed))
        if (
            (least is not None and result < least)
            or (above is not None and result <= above)
            or (most is not None and result > most)
        ):
            raise not_allowed(allowed)
        return result

    return read


def whole(least: int | None = None, most: int | None = None) -> Callable[[Any], int]:
    """A reader of whole numbers within bounds: 5e8, 2.0 and "2" are whole, 1.5 and true are not."""
    allowed = f"a whole number{_bounds(least, None, most)}"

    def read(value: Any) -> int:
        result = read_number(value, allowed)
        if result != int(result) or abs(result) >= 2**63:
            raise not_allowed(allowed)
        if (least is not None and result < least) or (most is not None and result > most):
            raise not_allowed(allowed)
        return int(result)

    return read


def one_of(*choices: str) -> Callable[[Any], str]:
    """A reader of one word out of several, in any case."""
    lower = {choice.lower(): choice for choice in choices}

    def read(value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in lower:
            raise not_allowed(", ".join(f'"{choice}"' for choice in choices))
        return lower[value.strip().lower()]

    return read


def read_dtype(value: Any) -> str:
    """A compute dtype by NumPy's name, from DeepSpeed's or NumPy's spelling or a dtype object."""
    if not isinstance(value, str):
        try:
            value = np.dtype(value).name
        except (TypeError, ValueError):
            value = None
    name = _DTYPE_NAMES.get(value.strip().lower()) if isinstance(value, str) else None
    if name is None:
        raise not_allowed('"fp32", "bf16" or "fp16" (or "float32", "bfloat16", "float16")')
    return name


def read_text(value: Any) -> str:
    """Text, or a path."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise not_allowed("text")
    return value


def read_texts(value: Any) -> list[str]:
    """A list of text."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise not_allowed("a list of text")
    return list(value)


def read_betas(value: Any) -> list[float]:
    """Adam's two decay rates, each in [0, 1)."""
    allowed = "a list of two numbers, each at least 0 and below 1"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise not_allowed(allowed)
    rates = [float(read_number(item, allowed)) for item in value]
    if not all(0 <= rate < 1 for rate in rates):
        raise not_allowed(allowed)
    return rates


Flag = Annotated[bool, BeforeValidator(read_flag)]
Int = Annotated[int, BeforeValidator(whole())]
Count = Annotated[int, BeforeValidator(whole(least=0))]
Positive = Annotated[int, BeforeValidator(whole(least=1))]
Number = Annotated[float, BeforeValidator(number())]
Size = Annotated[float, BeforeValidator(number(least=0))]
AboveZero = Annotated[float, BeforeValidator(number(above=0))]
Fraction = Annotated[float, BeforeValidator(number(least=0, most=1))]
Text = Annotated[str, BeforeValidator(read_text)]
Texts = Annotated[list[str], BeforeValidator(read_texts)]
Dtype = Annotated[str, BeforeValidator(read_dtype)]
Betas = Annotated[list[float], BeforeValidator(read_betas)]
