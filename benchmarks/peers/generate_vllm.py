"""vLLM's offline engine, once whenever it is asked; started by engine_smollm2.py as a process of its own.

A line on stdin names a workload of the job; the answer is a line of JSON on stdout. Nothing here imports LongArc.
The job says whether vLLM compiles the model (``is_compiled``) or runs it eagerly.

Usage: generate_vllm.py JOB.json
"""

import os
import sys
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)

import torch
import vllm
from protocol import answer, open_job


def main() -> None:
    """Load the job's model and serve its workloads."""
    job, answers = open_job()
    torch.set_num_threads(job["num_threads"])
    engine = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=not job["is_compiled"],
        skip_tokenizer_init=True,
        max_model_len=job["max_length"],
        max_num_seqs=max(len(prompts) for prompts in job["workloads"].values()),
        generation_config="vllm",
        disable_log_stats=True,
    )
    # As the engine beside it: the whole distribution, and the log-probability of each token drawn.
    sampling = vllm.SamplingParams(
        max_tokens=job["num_new"],
        min_tokens=job["num_new"],
        temperature=1.0,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    answer(answers, {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}})
    for line in sys.stdin:
        prompts = job["workloads"][line.strip()]
        engine.reset_prefix_cache()
        started_s = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        elapsed_s = time.perf_counter() - started_s
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        answer(answers, {"tokens_per_s": count / elapsed_s})


if __name__ == "__main__":
    main()
