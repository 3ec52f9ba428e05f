"""torchrun, with its failures as JSON for the launcher (`python -m wattwatch.trainer.launch.torchrun`).

torch's own torchrun prints them as a table for people and returns exit code 1, whatever happened.
"""

from __future__ import annotations

import json
import os
import sys

from wattwatch.trainer.launch.processes import terminate_with_parent
from wattwatch.trainer.launch.protocol import REPORT_VARIABLE


def main() -> None:
    # If the node program is killed, torchrun ends its ranks on SIGTERM; without it they would keep the GPUs.
    terminate_with_parent()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[1:]))  # type: ignore[no-untyped-call]  # torch leaves its command line untyped
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "pid": failure.pid, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        sys.stderr.write(f"{error}\n")
        if (descriptor := os.environ.get(REPORT_VARIABLE)) is not None:
            os.write(int(descriptor), json.dumps(failures).encode())
        sys.exit(1)
    except SignalException as error:
        sys.stderr.write(f"{error}; torchrun terminated its ranks\n")
        sys.exit(128 + error.sigval)  # as a shell reports it


if __name__ == "__main__":
    main()
