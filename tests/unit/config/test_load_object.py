import sys
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import pytest

from longarc.config.load_object import check_import_path, load_object
from longarc.errors import ConfigError

MODULE = """
class Greeter:
    name = "g"
    def greet(self):
        return "hello"

class Needy:
    def __init__(self, size):
        pass

class Nested:
    inner = Greeter()

class Loss:
    def __call__(self, x):
        return 2 * x

def double(x):
    return 2 * x

ready = Greeter()
number = 3
"""


@runtime_checkable
class Greets(Protocol):
    name: str

    def greet(self) -> str: ...


@runtime_checkable
class Scales(Protocol):
    def __call__(self, x: float) -> float: ...


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's file in the working directory, which is not installed and not on the path."""
    (tmp_path / "users_own.py").write_text(MODULE)
    (tmp_path / "broken_file.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    yield "users_own"
    sys.modules.pop("users_own", None)


def test_a_file_in_the_working_directory_can_be_named(module):
    assert load_object(f"{module}:double", kind=Callable)(3) == 6


def test_a_class_is_made_without_arguments_where_an_object_is_asked_for(module):
    assert load_object(f"{module}:Greeter", kind=Greets).greet() == "hello"
    assert load_object(f"{module}:Loss", kind=Scales)(3) == 6


def test_a_class_stays_a_class_where_one_is_asked_for(module):
    assert isinstance(load_object(f"{module}:Greeter", kind=type), type)
    assert isinstance(load_object(f"{module}:Greeter", kind=Callable), type)


def test_an_object_and_a_dotted_attribute_can_be_named(module):
    assert load_object(f"{module}:ready", kind=Greets).greet() == "hello"
    assert load_object(f"{module}:Nested.inner", kind=Greets).greet() == "hello"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_own.double", "is not an import path; write 'package.module:attribute'"),
        (":double", "is not an import path"),
        ("users_own:", "is not an import path"),
        (".users_own:double", "is not an import path"),
        ("users_won:double", "cannot load 'users_won:double': ModuleNotFoundError"),
        ("users_own:doubel", r"has no 'doubel'; did you mean 'double'\?"),
        ("users_own:Nested.outer", "has no 'Nested.outer'"),
        ("broken_file:x", "ZeroDivisionError"),
        ("users_own:number", "is a int, which is not a Greets: it lacks greet, name"),
        ("users_own:Needy", "cannot make an object of class"),
    ],
)
def test_what_cannot_be_loaded_is_a_config_error_that_says_why(module, path, message):
    with pytest.raises(ConfigError, match=message):
        load_object(path, kind=Greets)


def test_a_path_can_be_checked_without_running_its_module(module):
    check_import_path("broken_file:x")
    with pytest.raises(ConfigError, match="there is no module 'users_won'"):
        check_import_path("users_won:x")
    with pytest.raises(ConfigError, match=r"cannot load 'no_package\.module:x'"):
        check_import_path("no_package.module:x")
