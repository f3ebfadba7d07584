"""Write docs/algorithms.md from the docstrings of longarc.algos and from the tests that import its functions.

Usage: python scripts/algorithms_page.py > docs/algorithms.md
"""

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FunctionType

ROOT = Path(__file__).parents[1]
ALGOS = ROOT / "src" / "longarc" / "algos"
TEST_FOLDERS = ("golden", "property", "unit")
"""Where a test is looked for, what proves most first."""

INTRODUCTION = """# Algorithms

Every objective of `longarc.algos`: what it is called elsewhere, its formula, where that comes from, the function, a
test, and how a recipe asks for it. The table is generated from the docstrings (`make docs`); a test keeps it current.

How to read it:

* All functions are pure. A loss returns a sum and what to divide it by (`TokenLoss`), and a step divides once, by the
  sum over all its micro-batches and processes. So nothing depends on how a step was split.
* `pi` is the policy being trained, `pi_proximal` the one at the start of the step, `mu` the one that sampled the token
  as the engine reported it. `sg` stops the gradient. `w` are token weights, which decide the reduction.
* Tokens that are not trained are masked before anything is multiplied: they may hold NaN or infinities.
* Bounds are bounds and not epsilons where a band rejects (`low`, `high`), and epsilons where PPO clips (`eps_low`,
  `eps_high`). What excludes the ratio 1, and a gamma or lambda outside [0, 1], is an error before a run starts: each
  loss of a recipe is tried with a small batch first.
* A batch gets exactly one update, so `pi / pi_proximal` is 1 in its value. The losses that a recipe can name take the
  ratio that matters against `mu` instead; those of `icepop` and `ppo_clip` are as printed in their papers.
* In a recipe, `loss X` is `loss = { path = "longarc.algos.losses:X" }` of an RL or distillation stage, `reduction X` is
  `loss.reduction = "X"`, `advantage X` is `advantage = "X"`, `stage X` a stage of that kind; the others are keys of an RL
  stage. Behind it stand shipped recipes that use it. "–" is a function that no stage calls yet.

"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A function, what it is called elsewhere, and how a recipe asks for it."""

    module: str
    function: str
    name: str
    recipe: tuple[str, ...] = ()
    """``loss NAME``, ``advantage VALUE``, ``reduction VALUE``, a key of an RL stage, or ``stage KIND``."""


SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Advantages from rewards": (
        Entry("advantages", "group_advantages", "GRPO; GLM-4.5 with the mean alone", ("advantage std", "advantage mean")),
        Entry("advantages", "leave_one_out_baselines", "leave-one-out baseline", ("advantage leave_one_out",)),
        Entry("advantages", "rloo_advantages", "RLOO", ("advantage leave_one_out",)),
        Entry("advantages", "running_mean_advantages", "running mean", ("advantage running_mean", "running_mean_window")),
        Entry("reinforce_plus_plus", "carried_returns", "REINFORCE++, returns carried over observations"),
        Entry("reinforce_plus_plus", "batch_normalised", "REINFORCE++, with and without a group baseline",
              ("advantage reinforce_plus_plus", "advantage reinforce_plus_plus_baseline")),
    ),
    "Advantages from a critic": (
        Entry("gae", "token_gae", "GAE"),
        Entry("gae", "skip_observation_gae", "skip-observation GAE"),
        Entry("gae", "length_adaptive_lambda", "length-adaptive lambda"),
        Entry("gae", "cross_trajectory_gae", "cross-trajectory GAE"),
        Entry("actor_critic", "step_advantages", "WebRL's advantage of an action"),
    ),
    "Importance weights": (
        Entry("importance", "icepop_weights", "IcePop", ("loss icepop",)),
        Entry("importance", "double_sided_weights", "double-sided importance sampling (DIS)", ("loss double_sided",)),
        Entry("importance", "truncated_weights", "truncated importance sampling (TIS)", ("loss truncated",)),
        Entry("importance", "masked_weights", "masked importance sampling (MIS), with veto",
              ("loss masked", "loss masked_by_sequence", "loss masked_by_geometric_mean")),
        Entry("importance", "keeps_sequence", "off-policy sequence masking (OPSM)", ("loss opsm",)),
    ),
    "Policy losses": (
        Entry("clipping", "clipped_objective", "PPO's clip, asymmetric (DAPO), dual clip", ("loss ppo_clip",)),
        Entry("policy_loss", "ppo_clip_loss", "PPO", ("loss ppo_clip", "loss behaviour_ppo")),
        Entry("policy_loss", "icepop_loss", "GRPO with IcePop", ("loss icepop",)),
        Entry("policy_loss", "double_sided_loss", "DIS", ("loss double_sided",)),
        Entry("policy_loss", "cispo_loss", "CISPO", ("loss cispo",)),
        Entry("policy_loss", "gspo_loss", "GSPO", ("loss gspo",)),
        Entry("corrected_loss", "weighted_clip_loss", "PPO with importance weights",
              ("loss masked", "loss masked_by_sequence", "loss masked_by_geometric_mean")),
        Entry("corrected_loss", "truncated_loss", "PPO with TIS", ("loss truncated",)),
        Entry("corrected_loss", "decoupled_ppo_loss", "decoupled PPO"),
        Entry("corrected_loss", "sequence_masked_loss", "GRPO with OPSM", ("loss opsm",)),
        Entry("likelihood", "positive_example_loss", "likelihood of positive examples (VAPO)"),
        Entry("actor_critic", "kl_constrained_loss", "KL-constrained actor (WebRL)"),
    ),
    "Critics": (
        Entry("value_loss", "clipped_value_loss", "clipped value loss"),
        Entry("value_loss", "value_cross_entropy_loss", "value as probability of success"),
        Entry("value_loss", "explained_variance", "explained variance"),
    ),
    "Distillation": (
        Entry("distill", "distillation_advantages", "on-policy distillation, sampled token", ("stage distill",)),
        Entry("distill", "guided_advantages", "rewards and a teacher"),
        Entry("distill", "routed_logprobs", "several teachers, one for each task"),
        Entry("distill_vocabulary", "full_vocabulary_loss", "distillation over the vocabulary"),
        Entry("distill_vocabulary", "top_k_loss", "distillation over the teacher's likeliest tokens"),
    ),
    "Preferences and reward models": (
        Entry("preference", "dpo_loss", "DPO"),
        Entry("preference", "dpo_sft_loss", "DPO with SFT (AutoWebGLM)"),
        Entry("preference", "implicit_rewards", "DPO's implicit reward"),
        Entry("reward_model", "bradley_terry_loss", "pairwise reward model"),
        Entry("reward_model", "ranking_loss", "ranking of several answers"),
        Entry("reward_model", "outcome_loss", "outcome reward model"),
        Entry("reward_model", "judged_rewards", "verdict of a judge as reward"),
        Entry("reward_model", "win_rates", "comparisons as rewards (GLM-Z1)"),
    ),
    "What is trained, and how much it counts": (
        Entry("filters", "is_stale", "staleness by the oldest token", ("loop.max_lag_steps",)),
        Entry("filters", "repair_group", "group repair", ("loop.group_size",)),
        Entry("filters", "is_zero_variance", "dynamic sampling (DAPO)", ("loop.dynamic_sampling",)),
        Entry("filters", "is_in_difficulty_window", "difficulty window",
              ("loop.min_mean_reward", "loop.max_mean_reward")),
        Entry("shaping", "overlong_penalty", "soft overlong punishment (DAPO)", ("overlong",)),
        Entry("replay", "perplexity", "perplexity of an action"),
        Entry("replay", "is_worth_replaying", "replay filtered by perplexity (WebRL)"),
        Entry("reductions", "token_weights", "token mean, 1/G sum 1/len, segment mean, group mean",
              ("reduction token_mean", "reduction sequence_mean", "reduction segment_mean", "reduction group_mean")),
    ),
    "Drafts and indexer": (
        Entry("mtp", "acceptance", "acceptance of a draft", ("stage mtp",)),
        Entry("mtp", "single_step_tv", "TV loss of a draft step", ("stage mtp",)),
        Entry("mtp", "end_to_end_tv_loss", "end-to-end TV loss, with all probabilities at once"),
        Entry("mtp", "end_to_end_tv", "end-to-end TV loss", ("stage mtp",)),
        Entry("mtp", "expected_accepted", "expected acceptance length", ("stage mtp",)),
        Entry("index_share", "shared_index_loss", "indexer that several layers share", ("stage dsa",)),
        Entry("selection", "select_keys", "deterministic selection of keys", ("stage dsa",)),
        Entry("speculative", "acceptance_probability", "rejection sampling of a draft"),
        Entry("speculative", "residual", "what a refused draft leaves"),
    ),
}  # fmt: skip

ELSEWHERE = {
    "checks": "refusals",
    "delta_rule": "attention; see the guide of backbones",
    "fp8": "rounding; see the guide of the engine",
    "int4": "rounding; see the guide of backbones",
    "losses": "the names that recipes use, each a function of the table with its paper's defaults",
    "pattern_search": "search of layers",
    "protocols": "types",
    "schedule": "learning rates",
    "sequences": "sums over segments",
    "token_loss": "the record that losses return",
    "truncation": "top-k, top-p and min-p; see the guide of the engine",
}
"""Modules without an objective of their own."""

NOT_LISTED = {
    "checks of a row's settings": ("filters.check_window", "shaping.check_overlong"),
    "parts": (
        "clipping.constant_ratio",
        "clipping.summed_loss",
        "mtp.chained",
        "speculative.verified",
        "speculative.inverse_cdf",
    ),
}
"""Functions of listed modules that are no row, and why."""


def page() -> str:
    """Return the whole page."""
    importers = _importers()
    parts = [INTRODUCTION]
    for title, entries in SECTIONS.items():
        parts += [
            f"## {title}\n\n",
            "| algorithm | formula | source | function | test | in a recipe |\n",
            "|---|---|---|---|---|---|\n",
            *(_row(entry, importers) for entry in entries),
            "\n",
        ]
    return "".join(parts).rstrip() + "\n"


def _row(entry: Entry, importers: dict[tuple[str, str], list[Path]]) -> str:
    function = function_of(entry)
    tests = importers.get((entry.module, entry.function), [])
    test = sorted(tests, key=lambda path: path.name == "test_refusals.py")
    cells = [
        entry.name,
        f"`{formula(function)}`",
        source(function),
        f"[`{entry.module}.{entry.function}`](../src/longarc/algos/{entry.module}.py)",
        f"[{test[0].name}](../{test[0].relative_to(ROOT).as_posix()})" if test else "–",
        ", ".join(f"`{asked}`{_users(asked)}" for asked in entry.recipe) or "–",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _users(asked: str) -> str:
    """Return the recipes that ask for it, in brackets."""
    what, _, value = asked.partition(" ")
    found = []
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        stages = tomllib.loads(path.read_text(encoding="utf-8"))["stages"].values()
        said = {
            "loss": [stage.get("loss", {}).get("path", "").rpartition(":")[2] for stage in stages],
            "reduction": [stage.get("loss", {}).get("reduction", "") for stage in stages],
            "stage": [stage["kind"] for stage in stages],
        }.get(what, [])
        if value in said:
            found.append(path.stem)
    return f" ({', '.join(found)})" if found else ""


def function_of(entry: Entry) -> FunctionType:
    """Return the function of a row."""
    function: FunctionType = getattr(import_module(f"longarc.algos.{entry.module}"), entry.function)
    return function


def formula(function: FunctionType) -> str:
    """Return the first span of code in a docstring.

    Raises:
        ValueError: there is none.
    """
    found = re.search(r"``(.+?)``", inspect.getdoc(function) or "", re.DOTALL)
    if found is None:
        raise ValueError(f"{function.__name__} has no ``formula`` in its docstring")
    return " ".join(found[1].split())


def source(function: FunctionType) -> str:
    """Return the paragraph that begins with Source, of the function or else of its module.

    Raises:
        ValueError: there is none.
    """
    module = import_module(function.__module__)
    for text in (inspect.getdoc(function) or "", inspect.getdoc(module) or ""):
        found = re.search(r"Sources?: (.+?)(?:\n\n|\nArgs:|\Z)", text, re.DOTALL)
        if found is not None:
            said = re.sub(
                r":\w+:`~?([\w.]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", found[1]
            )
            return " ".join(said.split()).replace("``", "`")
    raise ValueError(f"{function.__name__} names no Source")


def _importers() -> dict[tuple[str, str], list[Path]]:
    """Return the tests that import each function of algos, those of the first folder first."""
    found: dict[tuple[str, str], list[Path]] = {}
    for folder in TEST_FOLDERS:
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            for name in _imported(path):
                found.setdefault(name, []).append(path)
    return found


def _imported(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longarc.algos."):
            module = (node.module or "").rpartition(".")[2]
            yield from ((module, alias.name) for alias in node.names)


if __name__ == "__main__":
    print(page(), end="")
