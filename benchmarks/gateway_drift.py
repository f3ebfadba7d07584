"""Random conversations of black-box clients with the gateway, each checked token by token against what the engine recorded.

``tests/drift_cases.py`` says what clients do and what is compared: every trained token, its log-probability and
version, every prefix, how often each sampled token is trained, and all of it again after a restart.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from common import natural, positive

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from drift_cases import play_all


def main() -> int:
    """Play and say what there was; a drift ends it with the seed that shows it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=positive, default=5000)
    parser.add_argument("--seed", type=natural, default=0, help="of the first conversation")
    parser.add_argument("--quick", action="store_true", help="100 conversations")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    num = 100 if arguments.quick else arguments.conversations
    seeds = range(arguments.seed, arguments.seed + num)
    counts = asyncio.run(play_all(seeds))
    for name, count in sorted(counts.items()):
        print(f"{name:>15} {count:>10}")
    print(f"{len(seeds)} conversations in {time.monotonic() - began_s:.0f} s: no drift")
    return 0


if __name__ == "__main__":
    sys.exit(main())
