import math

from longarc.runs.metrics import MetricRow
from longarc.viewer.curves import MAX_POINTS, headline, stage_charts


def rows(**metrics):
    """One row a step from lists of values."""
    names = {name.replace("__", "/"): values for name, values in metrics.items()}
    length = max(len(values) for values in names.values())
    return [
        MetricRow(
            stage="rl",
            step=step,
            time_s=0.0,
            values={name: values[step] for name, values in names.items() if step < len(values)},
        )
        for step in range(length)
    ]


def test_families_share_a_chart_and_the_mean_leads_it():
    charts = stage_charts(rows(success__files=[0.0], success__mean=[0.5], success__z=[1.0]))
    (chart,) = charts
    assert chart["title"] == "Success"
    assert [series["name"] for series in chart["series"]] == ["mean", "files", "z"]


def test_what_no_chart_knows_is_shown_apart():
    charts = stage_charts(rows(loss__lm_nats=[1.0], mine__own_number=[2.0]))
    assert [chart.get("is_other", False) for chart in charts] == [False, True]
    assert charts[1]["series"][0]["values"] == [2.0]


def test_long_curves_are_means_of_neighbours_and_keep_their_last_step():
    num_steps = 2 * MAX_POINTS + 1
    (chart,) = stage_charts(rows(grad__norm=[float(i) for i in range(num_steps)]))
    (series,) = chart["series"]
    assert series["stride"] == 3
    assert len(series["values"]) <= MAX_POINTS
    assert series["values"][:2] == [1.0, 4.0]
    assert series["steps"][-1] == num_steps - 1


def test_what_is_not_a_number_is_a_gap():
    (chart,) = stage_charts(rows(grad__norm=[1.0, math.nan, math.inf, 2.0]))
    assert chart["series"][0]["values"] == [1.0, None, None, 2.0]


def test_a_stage_is_summed_up_by_the_first_and_last_tenth_of_its_main_metric():
    losses = [10.0, 8.0, *[5.0] * 16, 3.0, 1.0]
    found = headline(rows(loss__lm_nats=losses, grad__norm=losses), "sft")
    assert (found["label"], found["first"], found["last"]) == ("loss", 9.0, 2.0)
    assert headline(rows(grad__norm=[1.0]), "sft") is None


def test_distillation_is_summed_up_by_its_distance_from_the_teachers():
    found = headline(rows(success__mean=[0.1], distill__kl_nats=[0.7]), "distill")
    assert (found["label"], found["last"]) == ("distillation KL", 0.7)


def test_value_pre_training_is_summed_up_by_what_the_critic_explains():
    found = headline(rows(success__mean=[0.1], critic__explained_variance=[0.3]), "value_pretrain")
    assert (found["label"], found["last"]) == ("explained variance", 0.3)


def test_a_critic_has_charts_of_its_own():
    charts = stage_charts(
        rows(
            critic__explained_variance=[0.1],
            return__mean=[0.5],
            critic__value_mean=[0.4],
            loss__value=[0.2],
            loss__value_last_update=[0.1],
            critic__clipped_frac=[0.0],
            advantage__mean=[0.0],
            advantage__std=[0.3],
            grad__norm=[1.0],
            grad__critic_norm=[2.0],
        )
    )
    assert [chart["title"] for chart in charts if not chart.get("is_other")] == [
        "Explained variance",
        "Returns and values",
        "Value loss",
        "Values that moved too far",
        "Advantages",
        "Gradient norm",
    ]
    assert not any(chart.get("is_other") for chart in charts)
