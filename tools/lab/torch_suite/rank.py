"""The program of a rank: it runs the tests of a plan in order, and ends after one that fails.

zbmd-node run -n 4 -m zbmd.tools.lab.torch_suite.rank FOLDER      as `jobs` starts it
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from zbmd.tools.lab.torch_suite.cases import load, test_class
from zbmd.tools.lab.torch_suite.jobs import Plan, RankResult, read_rank_results, write_rank_result

POLL_S: Final = 0.005


def main() -> None:
    """Run the plan of the folder that is named on the command line."""
    folder = Path(sys.argv[1])
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    if plan.backend == "zbmd":
        importlib.import_module("zbmd.torch")
    module, rank = load(plan.backend), int(os.environ["RANK"])
    for test in plan.tests:
        result = run_test(module, plan, folder, test, rank)
        write_rank_result(folder, test, rank, result)
        while len(found := read_rank_results(folder, test, plan.ranks)) < plan.ranks:
            time.sleep(POLL_S)
        if any(each.verdict == "failed" for each in found):
            sys.stdout.flush()
            os._exit(1)  # threads of a test may wait for ever


def run_test(module: Any, plan: Plan, folder: Path, test: str, rank: int) -> RankResult:
    """Run one test between the making and the end of a default group, as torch's own harness does."""
    dist: Any = importlib.import_module("torch.distributed")
    scratch = folder.parent / f"{folder.name}-{test}"
    for name in ("barrier", "test_dir", "init_dir"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
    os.environ.update(TEMP_DIR=str(scratch), INIT_METHOD=f"file://{scratch}/init_dir/shared_init_file")
    module.Barrier.barrier_id = 0
    case = test_class(module)(test)
    case.rank, case.file_name = rank, str(scratch / "store")
    limit = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(test, module.default_pg_timeout))
    try:
        dist.init_process_group(
            module.BACKEND, init_method=case.init_method, world_size=plan.ranks, rank=rank, timeout=limit
        )
        case._barrier()
        importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
        result = _outcome(case, test)
        if result.verdict != "failed":
            case._barrier()
            if dist.is_initialized():
                dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - whatever it is, it is reported
        return RankResult(verdict="failed", detail=traceback.format_exc())
    return result


def _outcome(case: Any, test: str) -> RankResult:
    skips: Any = importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS
    try:
        getattr(case, test)()
    except unittest.SkipTest as skip:
        return RankResult(verdict="skipped", detail=str(skip))
    except SystemExit as end:
        reasons = {each.exit_code: each.message for each in skips.values()}
        if end.code in reasons:
            return RankResult(verdict="skipped", detail=reasons[end.code])
        if end.code:
            return RankResult(verdict="failed", detail=f"sys.exit({end.code})")
    except Exception:  # noqa: BLE001 - whatever it is, it is reported
        return RankResult(verdict="failed", detail=traceback.format_exc())
    return RankResult(verdict="passed")


if __name__ == "__main__":
    main()
