"""Small spherized text encoders, with their plain counterparts, and the log of transformers."""

import logging
from collections.abc import Iterator

import pytest
import transformers
from small_encoders import Encoder


@pytest.fixture(params=["bert", "roberta"])
def family(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(request.param)


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the log of transformers, whose loggers do not propagate, and clear the cache of `warning_once`."""
    logger = logging.getLogger("transformers")
    transformers.utils.logging.warning_once.cache_clear()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
