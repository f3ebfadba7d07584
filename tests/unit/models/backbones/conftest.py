"""Without transformers there is nothing to compare with."""

import pytest

pytest.importorskip("transformers")
