import re

import pytest

from longarc.envs.tasks.reasoning import Reasoning
from longarc.envs.tasks.worked import WORKED, chain_sum, number_filtering
from longarc.errors import ConfigError
from longarc.records.message import Message, Role
from longarc.records.outcome import Outcome
from longarc.records.trajectory import EpisodeResult

EVERY = {name: {} for name in WORKED}


def said(text, *, outcome=Outcome.COMPLETED, reasoning=None):
    last = Message(role=Role.ASSISTANT, content=text, reasoning=reasoning)
    return EpisodeResult(outcome=outcome, messages=(last,), num_turns=1)


def task_of(family, dataset):
    return next(t for t in family.tasks("train", cursor=0) if t.data["dataset"] == dataset)


def test_every_family_with_an_expert_shows_working_that_ends_in_the_right_answer():
    family = Reasoning(families=EVERY)
    seen = set()
    for index in range(100):
        demo = family.demonstration(index)
        answer = demo.messages[-1]
        assert answer.reasoning
        assert len(answer.reasoning) < 200
        seen.add(index % len(EVERY))
    assert len(seen) == len(EVERY)


def test_direct_answers_are_shown_with_their_share_and_are_the_same_answers():
    thinks, mixed = Reasoning(), Reasoning(expert_direct_frac=0.4)
    num_direct = 0
    for index in range(300):
        (_, worked), (_, other) = (
            thinks.demonstration(index).messages,
            mixed.demonstration(index).messages,
        )
        assert other.content == worked.content
        assert other.reasoning in ("pass", worked.reasoning)
        num_direct += other.reasoning == "pass"
    assert 90 < num_direct < 150


def test_drills_are_shown_with_their_share_and_every_sum_of_them_is_true():
    family = Reasoning(expert_drill_frac=0.3)
    demos = [family.demonstration(index) for index in range(200)]
    drills = [demo for demo in demos if len(demo.messages) > 2]
    assert 40 < len(drills) < 80
    for demo in drills:
        assert not demo.thinking
        for asked, answered in zip(demo.messages[::2], demo.messages[1::2], strict=True):
            sum_, _, result = answered.content.partition("=")
            assert sum_ == asked.content
            left, operator, right = re.fullmatch(r"(-?\d+)([+-])(\d)", sum_).groups()
            assert int(result) == int(left) + int(f"{operator}{right}")


@pytest.mark.parametrize(
    ("families", "found"),
    [
        ({"number_sorting": {}}, "no chain_sum"),
        ({"chain_sum": {"min_terms": 2}}, "min_terms is 2"),
    ],
)
def test_drills_that_could_give_away_held_out_tasks_are_refused(families, found):
    with pytest.raises(ConfigError, match=found):
        Reasoning(families=families, expert_drill_frac=0.1)


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_running_sums_are_true_line_by_line_and_end_in_the_answer(digits):
    settings = {"min_digits": digits, "max_digits": digits, "allow_negation": False}
    family = Reasoning(families={"chain_sum": settings})
    for index in range(200):
        _, answer = family.demonstration(index).messages
        results = []
        for line in answer.reasoning.split("\n"):
            head, result = re.split(r"[;=](?=-?\d+$)", line)
            results.append(int(result))
            for step in re.findall(r"(?<=[:,])[^,;]+", line):
                left, right = step.split("=")
                assert eval(left) == int(right), line
            assert eval(head.split(":")[0]) == int(result), line
        assert results[-1] == int(answer.content)


def test_columns_carry_and_borrow_as_on_paper():
    def working(expression):
        return chain_sum({"metadata": {"expression": expression, "num_digits": 2}})

    assert working("37 + 85") == "37+85:7+5=12,3+8+1=12;122"
    assert working("37 - 85") == "37-85:15-7=8,8-3-1=4;-48"
    assert working("37 - 85 - 12") == "37-85:15-7=8,8-3-1=4;-48\n-48-12:8+2=10,4+1+1=6;-60"


def test_a_number_equal_to_the_bound_is_neither_smaller_nor_larger():
    def working(operation):
        numbers = {"original_numbers": ["14", "37", "52"], "filter_value": "37"}
        return number_filtering({"metadata": {**numbers, "operation": operation}})

    assert working("keep_smaller") == "14<37 keep\n37=37 drop\n52>37 drop"
    assert working("remove_larger") == "14<37 keep\n37=37 keep\n52>37 drop"


def test_demonstrations_are_easier_than_tasks_unless_told_otherwise():
    family = Reasoning(families={"chain_sum": {}})
    equal = Reasoning(families={"chain_sum": {}}, expert_families={"chain_sum": {"max_terms": 5}})
    assert {family.demonstration(i).difficulty for i in range(60)} == {2.0, 3.0, 4.0}
    assert {equal.demonstration(i).difficulty for i in range(60)} == {2.0, 3.0, 4.0, 5.0}


@pytest.mark.parametrize("dataset", sorted(WORKED))
async def test_a_right_answer_wins_whatever_was_thought_and_a_cut_one_never(dataset):
    family = Reasoning(families=EVERY)
    task = task_of(family, dataset)
    right = task.data["answer"]
    assert (await family.grade(task, said(right, reasoning="nonsense"))).value == 1.0
    assert (await family.grade(task, said("", reasoning=right))).value == 0.0
    cut = said(right, outcome=Outcome.TRUNCATED_TOKENS)
    assert (await family.grade(task, cut)).value == 0.0


@pytest.mark.parametrize("dataset", sorted(WORKED))
async def test_the_right_answer_among_others_is_not_right(dataset):
    family = Reasoning(families=EVERY)
    task = task_of(family, dataset)
    for text in (f"1 2 3 {task.data['answer']}", f"{task.data['answer']} or 7", "8"):
        assert (await family.grade(task, said(text))).value == 0.0


@pytest.mark.parametrize("poison", ["NaN", "Infinity", "1e999"])
async def test_a_list_that_is_no_list_of_the_given_numbers_is_refused(poison):
    family = Reasoning(families={"number_sorting": {}})
    task = task_of(family, "number_sorting")
    count = task.data["answer"].count("'") // 2
    answer = "[" + ", ".join([poison] * count) + "]"
    assert (await family.grade(task, said(answer))).value == 0.0


async def test_sorting_something_close_to_the_numbers_is_not_sorting_them():
    family = Reasoning(families={"number_sorting": {}})
    task = task_of(family, "number_sorting")
    close = re.sub(r"(\d)\.0", r"\1.4", task.data["answer"])
    assert (await family.grade(task, said(close))).value == 0.0
    spaced = task.data["answer"].replace("'", '"')
    assert (await family.grade(task, said(spaced))).value == 1.0


async def test_partial_credit_is_reasoning_gyms_own_and_only_on_request():
    strict = Reasoning(families={"spell_backward": {}})
    partial = Reasoning(families={"spell_backward": {}}, is_partial=True)
    task = task_of(strict, "spell_backward")
    right = task.data["answer"]
    almost = right[:-1] + ("x" if right[-1] != "x" else "y")
    low = await partial.grade(task, said(almost))
    assert 0.5 < low.value < 1.0
    assert low.parts["success"] == 0.0
    assert (await strict.grade(task, said(almost))).value == 0.0


def test_questions_are_short():
    family = Reasoning(families=EVERY)
    for _, task in zip(range(100), family.tasks("test", cursor=0), strict=False):
        assert len(task.messages[0].content) <= 120


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"families": {"gdc": {}}}, "no family 'gdc'; choose gcd"),
        ({"thinking": False, "expert_direct_frac": 0.5}, "expert_direct_frac=0.5 .* thinking"),
        ({"families": {}}, "families"),
        ({"families": {"chain_sum": {"max_turms": 3}}}, "max_turms"),
        ({"families": {"chain_sum": {"min_terms": 9}}}, "max_terms must be >="),
        ({"expert_families": {"spell_backward": {}}}, "not among families"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Reasoning(**settings)


async def test_any_family_of_reasoning_gym_can_be_a_task_but_not_a_demonstration():
    family = Reasoning(families={"gcd": {"max_value": 20}, "chain_sum": {}})
    task = task_of(family, "gcd")
    assert (await family.grade(task, said(task.data["answer"]))).value == 1.0
    assert (await family.grade(task, said("0"))).value == 0.0
    for index in range(2):
        with pytest.raises(ConfigError, match=r"\['gcd'\] have no expert"):
            family.demonstration(index)


def test_without_thinking_the_expert_answers_at_once_and_the_instruction_stands_behind_the_question():
    family = Reasoning(families={"chain_sum": {}}, thinking=False, instruction="Only the number.")
    demo = family.demonstration(0)
    assert not demo.thinking
    assert demo.messages[-1].reasoning is None
    assert demo.messages[0].content.endswith("\nOnly the number.")
    task = next(family.tasks("test", cursor=0))
    assert task.messages[0].content.endswith("\nOnly the number.")
    plain = next(Reasoning(families={"chain_sum": {}}).tasks("test", cursor=0))
    assert task.messages[0].content.startswith(plain.messages[0].content)


async def test_the_last_number_of_a_sentence_can_be_the_answer():
    family = Reasoning(families={"chain_sum": {}}, answer_from="last_number")
    task = task_of(family, "chain_sum")
    right = task.data["answer"]
    assert (await family.grade(task, said(f"3 and 4 make {right}."))).value == 1.0
    assert (await family.grade(task, said(f"{right}, or was it 999?"))).value == 0.0
    assert (await family.grade(task, said("I do not know."))).value == 0.0
    cut = said(f"It is {right}", outcome=Outcome.TRUNCATED_TOKENS)
    assert (await family.grade(task, cut)).value == 0.0
