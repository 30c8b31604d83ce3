"""The table of messages and their handlers."""

import pytest

from collectives.api import EngineError
from collectives.controller.messages import Inquiry, Leave, Left
from collectives.engine.loop import Dispatch


def test_each_message_goes_to_the_handler_of_its_kind():
    dispatch, heard = Dispatch(), []
    dispatch.on(Leave, lambda message: heard.append(("leave", message)))
    dispatch.on(Left, lambda message: heard.append(("left", message)))
    dispatch(Left())
    dispatch(Leave())
    assert heard == [("left", Left()), ("leave", Leave())]


def test_a_message_without_a_handler_is_an_error():
    dispatch = Dispatch()
    dispatch.on(Leave, print)
    with pytest.raises(EngineError, match=r"Inquiry\(\) is not a message for this rank"):
        dispatch(Inquiry())


def test_a_second_handler_does_not_replace_the_first():
    dispatch, heard = Dispatch(), []
    dispatch.on(Leave, heard.append)
    with pytest.raises(EngineError, match="messages of kind Leave already go to <built-in method append"):
        dispatch.on(Leave, print)
    dispatch(Leave())
    assert heard == [Leave()]
