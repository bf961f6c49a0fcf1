"""The exceptions: one a kind, by name, with their bases."""

from __future__ import annotations

import pickle

import pytest

import kvxfer as kx
from kvxfer import errors

NAMES = [name for name in errors.__all__ if name != "KvxferError"]


@pytest.mark.parametrize("name", NAMES)
def test_each_kind(name: str) -> None:
    kind = getattr(kx, name)
    assert kind is getattr(errors, name)
    assert issubclass(kind, kx.KvxferError)
    assert kind.__doc__
    error = kind("page 7 is taken")
    assert error.room is None
    error.room = 42
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.room) == (kind, "page 7 is taken", 42)


def test_builtin_bases() -> None:
    assert issubclass(kx.BadArgument, ValueError)
    assert issubclass(kx.ListenError, OSError)
    assert issubclass(kx.WaitTimeout, TimeoutError)
    assert not issubclass(kx.TransferTimeout, TimeoutError), "a room that timed out is not a wait that did"


def test_everything_public_is_there() -> None:
    for name in kx.__all__:
        assert hasattr(kx, name)
    assert set(errors.__all__) <= set(kx.__all__)
    assert kx.__version__.count(".") == 2
