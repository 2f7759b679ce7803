"""A script in two processes of one run, as torchrun starts them: `two_processes.py PORT SCRIPT ARGUMENT...`."""

import os
import runpy
import sys

port, script, *arguments = sys.argv[1:]
ranks = []
for rank in ("0", "1"):
    process = os.fork()
    if not process:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update(own, MASTER_ADDR="localhost", MASTER_PORT=port)
        sys.argv[:] = [script, *arguments]
        runpy.run_path(os.path.join(os.path.dirname(__file__), script), run_name="__main__")
        break
    ranks.append(process)
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks))
