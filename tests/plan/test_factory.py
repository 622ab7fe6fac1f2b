"""Loading FILE.py:FACTORY, and what is said where that does not work."""

import sys

import pytest

import jzero
from jzero.errors import JzeroError
from jzero.factory import load

GOOD = """
import jzero
def make():
    return jzero.Workload(None, lambda model, batch, rng: 0.0, lambda rows: {})
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """text -> a new file's path; what importing it leaves behind is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def write(text, name="job_of_a_user.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_factory(file):
    assert isinstance(load(f"{file(GOOD)}:make"), jzero.Workload)


def test_modules_beside_the_file_are_found(file):
    file("value = 3\n", "beside_it.py")
    path = file(f"import beside_it\n{GOOD.replace('None', 'beside_it.value')}")
    assert load(f"{path}:make").init == 3


def test_a_name_that_is_taken_does_not_matter(file):
    path = file(GOOD, "json.py")
    assert isinstance(load(f"{path}:make"), jzero.Workload)
    assert sys.modules["json"].__file__ != str(path)


def test_a_module_that_is_there_is_not_run_again(file):
    path = file("count = []\n" + GOOD.replace("def", "count.append(1)\ndef", 1))
    load(f"{path}:make")
    load(f"{path}:make")
    assert sys.modules["job_of_a_user"].count == [1]


OTHERS = "def other():\n    pass\ndef _hidden():\n    pass\nclass Kind:\n    pass\nx = 1\n"


@pytest.mark.parametrize(
    "source, name, message",
    [
        (OTHERS, "make", "has no 'make'; factories there: other"),
        ("x = 1\n", "make", "has no 'make'; there are no factories in it"),
        (OTHERS, "x", "x is an int, not a factory; factories there: other"),
        ("def make(size, *rest, n=1):\n    pass\n", "make", "needs arguments (size)"),
        (
            "from flax import nnx\nclass Net(nnx.Module):\n    def __init__(self, rngs): pass\n",
            "Net",
            "Net needs arguments (rngs)",
        ),
        (GOOD.replace("lambda rows: {}", "{}"), "make", "batch is {}; give a function batch(rows)"),
        ("def make():\n    return None\n", "make", "make() returned None; a factory returns a"),
        ("def make():\n    return {}\n", "make", "make() returned a dict"),
        ("def make():\n    raise KeyError('a\\nb')\n", "make", "make() raised KeyError: "),
        ("import no_such_module\n", "make", "importing the file raised ModuleNotFoundError"),
        ("def make(:\n", "make", "importing the file raised SyntaxError"),
        ("raise SystemExit(3)\n", "make", "importing the file raised SystemExit: 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(file, source, name, message):
    with pytest.raises(JzeroError) as caught:
        load(f"{file(source)}:{name}")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_failed_is_not_kept(file):
    with pytest.raises(JzeroError):
        load(f"{file('raise ValueError')}:make")
    assert "job_of_a_user" not in sys.modules


@pytest.mark.parametrize("reference", ["model.py", ":make", "model.py:", "model.py:a b"])
def test_a_reference_has_a_file_and_a_factory(reference):
    with pytest.raises(JzeroError, match="give a file and a factory in it"):
        load(reference)


def test_other_files_are_refused(file):
    with pytest.raises(JzeroError, match="not a Python file"):
        load(f"{file('', 'config.json')}:make")
