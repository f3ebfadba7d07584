import pytest
import torch

from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from model_cases import sharpened, small_glm, small_llama, small_qwen


@pytest.fixture
def glm() -> Decoder:
    return sharpened(build_model(small_glm(), seed=3))


@pytest.fixture
def llama() -> Decoder:
    return sharpened(build_model(small_llama(), seed=3))


@pytest.fixture
def qwen() -> Decoder:
    """Biases, norms of heads and YaRN."""
    return sharpened(build_model(small_qwen(), seed=3))


@pytest.fixture
def shared_glm() -> Decoder:
    """Layers 1, 2 and 4 have no indexer."""
    config = small_glm(num_hidden_layers=5, index_topk_pattern="FSSFS")
    return sharpened(build_model(config, seed=3))


@pytest.fixture(params=["glm", "shared_glm"])
def indexed(request) -> Decoder:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["glm", "shared_glm", "llama", "qwen"])
def decoder(request) -> Decoder:
    return request.getfixturevalue(request.param)


@pytest.fixture
def make_ids():
    generator = torch.Generator().manual_seed(5)
    return lambda length: torch.randint(0, 64, (length,), generator=generator)
