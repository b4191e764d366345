"""A site's process that has imported what messages need, and forks one for each.

Flower's SuperExec asks its SuperNode for messages all the time, and starts a Python for each, which imports PyTorch
anew. This is the SuperExec with another executor: it sleeps until the SuperNode, which holds the other end of its
standard input, writes a byte, and ends with it. Nothing of an app, a message or the data is ever in this process, but
the package transformers where the byte says that it takes it; what is forked runs Flower's own code of a ClientApp, and
ends with its message.
"""

import ctypes
import importlib
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.exit import exit_handler
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import run_clientapp

import fedskew.deploy._client  # noqa: F401, for what it imports
from fedskew.deploy.supernode import TRANSFORMERS
from fedskew.models import has_kernels

PR_SET_PDEATHSIG = 1
LONGEST_WAIT = 30.0
"""Seconds until a message is asked for all the same, such as one whose process was killed before it began."""


class Forks(SubprocessExecutor):
    """Flower's executor of messages, as forks of this process."""

    def reconcile(self) -> None:
        """Wait for the next message, or the SuperNode's end."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # earlier ones that have ended
                pass
        if not select.select([0], [], [], LONGEST_WAIT)[0]:
            return
        if not (word := os.read(0, 1)):
            sys.exit()
        if word == TRANSFORMERS:
            with suppress(Exception):  # whoever needs it says so
                importlib.import_module("transformers.models.auto.modeling_auto")

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Answer a message in a process of its own."""
        if os.fork() == 0:
            os._exit(_answer(spec))
        return LaunchResult.accepted()


def _answer(spec: ExecutionSpec) -> int:
    exit_handler.registered_exit_handlers.clear()  # the parent's
    for number in exit_handler.SIGNAL_TO_EXIT_CODE:
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["flwr-clientapp"]
    try:
        run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
            parent_pid=os.getppid(),
            runtime_dependency_install=spec.runtime_dependency_install,
        )
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 1


def main() -> None:
    """Run Flower's SuperExec, whose options it takes, with this executor."""
    os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.01"  # as the executor waits
    has_kernels()  # loads Numba, which takes a fork half a second
    superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    superexec.get_executor = lambda *_, **__: Forks()
    # The kernel ends this process with its parent; Flower would start a thread for that, beside which no fork is safe.
    superexec.start_parent_process_monitor = lambda _: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    flower_superexec()
