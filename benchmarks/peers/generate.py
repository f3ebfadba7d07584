"""transformers' ``generate``, once whenever it is asked; started by engine.py and engine_smollm2.py as a process of its own.

A line on stdin names a workload of the job; the answer is a line of JSON on stdout. Nothing here imports LongArc.

Usage: generate.py JOB.json
"""

import os
import sys
import time
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
from protocol import answer, open_job


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
    job, answers = open_job()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"],
        dtype=getattr(torch, job.get("dtype", "float32")),
        attn_implementation=job.get("attention", "sdpa"),
    ).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(job["probe"])[None]
    with torch.inference_mode():
        logits = model(ids).logits[0, -1].float().tolist()
    ready = {
        "logits": logits,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    answer(answers, ready)
    for line in sys.stdin:
        speed = tokens_per_s(model, job["workloads"][line.strip()], job["num_new"])
        answer(answers, {"tokens_per_s": speed})


if __name__ == "__main__":
    main()
