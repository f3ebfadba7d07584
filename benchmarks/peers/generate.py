"""transformers' ``generate``, once whenever it is asked; started by engine.py as a process of its own.

A line on stdin names a workload of the job; the answer is a line of JSON on stdout. Nothing here imports LongArc.

Usage: generate.py JOB.json
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers


def tokens_per_s(model: torch.nn.Module, prompts: list[list[int]], num_new: int) -> float:
    """Sample the same number of tokens behind every prompt."""
    ids = torch.tensor(prompts)
    started_s = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
        )
    elapsed_s = time.perf_counter() - started_s
    return (output.shape[1] - ids.shape[1]) * len(prompts) / elapsed_s


def main() -> None:
    """Load the job's model and serve its workloads."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print does not belong among the replies
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(job["probe"])[None]
    with torch.inference_mode():
        logits = model(ids).logits[0, -1].tolist()
    ready = {
        "logits": logits,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    print(json.dumps(ready), file=replies, flush=True)
    for line in sys.stdin:
        speed = tokens_per_s(model, job["workloads"][line.strip()], job["num_new"])
        print(json.dumps({"tokens_per_s": speed}), file=replies, flush=True)


if __name__ == "__main__":
    main()
