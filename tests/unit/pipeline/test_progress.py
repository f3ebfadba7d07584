import io

from longarc.pipeline.progress import ProgressLine, describe
from longarc.records.metric import Metric


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(stream, times, steps, **settings):
    clock = iter(times)
    line = ProgressLine(stream, clock=lambda: next(clock), **settings)
    for step in steps:
        line.update(
            stage="sft", step=step, num_steps=10, metrics=[Metric("loss/lm_nats", 2.0 * step, 2.0)]
        )
    return stream.getvalue()


def test_a_file_gets_plain_lines_at_intervals_and_always_the_last_step():
    text = show(io.StringIO(), [0.0, 1.0, 6.0, 7.0], [1, 2, 3, 10], plain_every_s=5.0)
    lines = text.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "3/10", "10/10"]
    assert "loss 3.000" in lines[1]


def test_the_time_left_follows_from_the_steps_of_this_stage():
    text = show(io.StringIO(), [0.0, 10.0], [2, 4], plain_every_s=1.0)
    assert text.splitlines()[1].endswith("30 s left")


def test_a_terminal_gets_one_line_that_is_written_over():
    text = show(Terminal(), [0.0, 0.1, 0.2], [1, 2, 10])
    assert text.count("\r") == 3
    assert text.count("\n") == 1


def test_success_of_each_family_and_what_was_lost_are_named():
    text = describe(
        {
            "reward/mean": 0.5,
            "success/mean": 0.5,
            "success/files": 0.25,
            "outcome/env_crashed": 2.0,
            "outcome/completed": 9.0,
            "excluded/stale": 1.0,
            "excluded/zero_variance": 2.0,
        }
    )
    assert text == "reward 0.50  files 25%  lost 2  excluded 3"
