"""TRL's GRPOTrainer, one step whenever it is asked; runs in .venv-peers, started by grpo.py.

A line on stdin asks for one step: sampling, rewards, loss, backward and optimizer. Each answer is a
line of JSON on stdout. Nothing here imports LongArc.

Usage: trl_grpo.py JOB.json
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import IO, Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")

import tokenizers
import torch
import transformers
import trl
from datasets import Dataset
from protocol import answer, open_job

EOS, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"


def word_tokenizer(vocab_size: int) -> Any:
    """Make every id a word, so that text and ids are the same thing."""
    vocab = {f"w{index}": index for index in range(vocab_size - 3)}
    for token in (EOS, PAD, UNKNOWN):
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN
    )


class StepOnDemand(transformers.TrainerCallback):
    """Waits for a line before each step and answers after it."""

    def __init__(self, answers: IO[str], model: torch.nn.Module, samples: list[list[int]]) -> None:
        self._answers, self._samples = answers, samples
        self._probe = next(p for p in model.parameters() if p.dim() == 2)
        self._before = self._probe.detach().clone()
        self._started_s = self._cpu_started_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self._samples.clear()
        self._before.copy_(self._probe.detach())
        self._started_s, self._cpu_started_s = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        elapsed_s = time.perf_counter() - self._started_s
        cpu_s = time.process_time() - self._cpu_started_s
        reply = {
            "elapsed_s": elapsed_s,
            "cpu_s": cpu_s,
            "num_samples": len(self._samples),
            "lengths": sorted({len(ids) for ids in self._samples}),
            "has_learned": not torch.equal(self._before, self._probe.detach()),
        }
        answer(self._answers, reply)


def main() -> None:
    """Build the trainer of the job and serve its steps."""
    job, answers = open_job()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = word_tokenizer(model.config.vocab_size)
    prompts = [" ".join(f"w{index}" for index in prompt) for prompt in job["prompts"]]
    samples: list[list[int]] = []

    def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
        samples.extend(completion_ids)
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    num_samples = len(prompts) * job["group_size"]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=even_ids,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[StepOnDemand(answers, model, samples)],
        args=trl.GRPOConfig(
            output_dir=str(Path(job["scratch"]) / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=job["gradient_checkpointing"],
            per_device_train_batch_size=job["micro_batch_samples"],
            gradient_accumulation_steps=num_samples // job["micro_batch_samples"],
            num_generations=job["group_size"],
            max_completion_length=job["num_new"],
            generation_kwargs={"min_new_tokens": job["num_new"]},
            temperature=1.0,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_steps=job["num_steps"],
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    answer(answers, {"versions": versions | {"torch": torch.__version__}})
    trainer.train()


if __name__ == "__main__":
    main()
