import pytest
from hybrid_cases import PATTERN, hybrid

from longarc.models.decoder_base import Decoder


@pytest.fixture(params=["glm", "llama"])
def base(request) -> str:
    return request.param


@pytest.fixture
def decoder(base) -> Decoder:
    return hybrid(base, PATTERN)
