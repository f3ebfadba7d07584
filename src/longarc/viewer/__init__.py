"""Shows runs to people: the report, one file in which a run can be understood at one look.

::

    run directory --> overview, curves, matrix, samples, trajectories --> report --> report.html
                      (plain data, numbers from metrics and ledger)       (assets/report.{html,css,js})

Python gathers the numbers and decides what they mean (intervals, forgetting, which trajectories are
shown); the script in ``assets`` only draws. Everything a model or a user wrote is data on its whole
way: it is embedded as JSON and reaches the page as text, never as markup.
"""
