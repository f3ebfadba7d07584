"""How many compute threads a thread of this process uses."""

import torch


def set_compute_threads(num_threads: int) -> None:
    """Let operators that are called from this thread use ``num_threads`` threads, whatever others set later.

    torch keeps one number for the process beside those of its threads, and a thread takes over that one when it
    first asks for its own. So it asks here: between setting and asking, another thread may have set the other.
    """
    torch.set_num_threads(num_threads)
    torch.get_num_threads()
