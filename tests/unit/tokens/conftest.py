import pytest

from longarc.tokens.glm import GlmFormat
from longarc.tokens.tokenizer import Tokenizer
from token_samples import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="session")
def glm(tokenizer: Tokenizer) -> GlmFormat:
    return GlmFormat(tokenizer)


@pytest.fixture(scope="session")
def glm_5_2(tokenizer: Tokenizer) -> GlmFormat:
    return GlmFormat(tokenizer, version="glm-5.2")
