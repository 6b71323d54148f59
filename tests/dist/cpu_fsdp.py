"""Run a script with FSDP2 on CPU processes, which Accelerate refuses: `python tests/dist/cpu_fsdp.py script.py ...`.

After an ordinary start its state classes are told that the launcher's FSDP plugin is in use. For tests alone: training
on real devices needs nothing of this.
"""

import runpy
import sys

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

start = Accelerator.__init__


def start_with_fsdp(self, *args, **kwargs) -> None:
    start(self, *args, **kwargs)
    # reads the launcher's FSDP_* variables
    plugin = FullyShardedDataParallelPlugin()
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


if __name__ == "__main__":
    Accelerator.__init__ = start_with_fsdp
    sys.argv = sys.argv[1:]
    sys.path.insert(0, ".")
    runpy.run_path(sys.argv[0], run_name="__main__")
