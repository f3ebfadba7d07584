import json
from pathlib import Path

import pytest
import torch

from longarc.algos.selection import select_keys

CASES = json.loads((Path(__file__).parent / "data" / "topk_deterministic.json").read_bytes())[
    "cases"
]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_selected_keys_match_the_hand_written_numbers(case):
    scores = torch.tensor([case["scores"]], dtype=torch.float64)
    assert select_keys(scores, num_selected=case["k"]).tolist() == [case["selected"]]
