"""Prints how many models are right, loud and silent, by class, and what is wrong with the others."""

import argparse
import collections
import logging
import os
import time
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch

from tests.trust import table  # noqa: F401  it defines the cases
from tests.trust.cases import CASES
from tests.trust.generated import generated
from tests.trust.judge import judge


def seeds(text: str) -> range:
    """Returns the seeds that ``17``, ``100:200`` or ``0:1000:5`` stands for."""
    first, *more = map(int, text.split(":"))
    return range(first, *more) if more else range(first, first + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trust", description=__doc__)
    parser.add_argument("words", nargs="*", help="run the cases that have one of these in their class or name")
    parser.add_argument("-v", "--verbose", action="store_true", help="print which calls each graph answered")
    parser.add_argument("--generated", type=seeds, metavar="SEEDS", help="run random models: 17, 100:200, 0:1000:5")
    parser.add_argument("--runtime", choices=["onnxruntime"], help="fuse the graphs for this runtime")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.generated:
        chosen = map(generated, options.generated)
    else:
        words = options.words or [""]
        chosen = (case for case in CASES if any(word in f"{case.group}: {case.name}" for word in words))
    counts, faults, controls, seconds = collections.defaultdict(collections.Counter), 0, 0, time.perf_counter()
    for case in chosen:
        verdict = judge(case, options.runtime)
        counts[case.group][verdict.outcome] += 1
        faults, controls = faults + bool(verdict.faults()), controls + case.control
        if found := verdict.faults():
            more = f" (and {len(found) - 1} more)" if found[1:] else ""
            print(f"{case.group}: {case.name}: {' '.join(found[0].split())[:300]}{more}", flush=True)
        if options.verbose:
            print(f"{verdict.outcome:6}  {case.group}: {case.name}: answered {verdict.accepted()}", flush=True)
            print(*filter(None, [case.source, verdict.alarm]), sep="\n", flush=True)
    total = sum(counts.values(), collections.Counter())
    width = max(map(len, counts), default=0)
    print(f"\n{'':{width}}  models  right  loud  silent")
    for group, count in [*counts.items(), ("all", total)]:
        print(f"{group:{width}}  {count.total():6}  {count['right']:5}  {count['loud']:4}  {count['silent']:6}")
    print(f"\n{controls} of them are controls; {faults} models have a fault; {time.perf_counter() - seconds:.0f} s")
    return min(faults, 1)


if __name__ == "__main__":
    raise SystemExit(main())
