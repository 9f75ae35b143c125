"""Rows 212 to 228: what torch 2.14 and 2.15 added to the API, and what it takes there."""

from __future__ import annotations

import pytest

from tests.checklist.peers import Peer, free_port
from tests.checklist.test_today_command import TODAY

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]


def printed_lines(peer: Peer, code: str, *args: str) -> list[str]:
    """The lines that a program prints; it must end well."""
    done = peer.python(code, *args)
    assert done.returncode == 0, done.err
    return done.out.splitlines()


HANDLER = """
import os
from functools import partial
from {elastic}.multiprocessing import errors
class PrintingHandler(errors.ErrorHandler):
    raises = False
    def initialize(self): print("initialize", self._fn_name)
    def record_exception(self, e): print("exception", e, self._fn_name)
    def record_success(self):
        print("success", self._fn_name)
        if self.raises: raise ValueError("no telemetry")
def works(): return 7
def fails(): raise KeyError("bad")
"""


@pytest.mark.row(212, since=TODAY)
def test_an_error_handler_knows_the_functions_name_before_it_begins(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        HANDLER + "print(errors.record(works, PrintingHandler())())\n"
        "print(errors.record(partial(int, '8'), PrintingHandler())())\n"
        "try: errors.record(fails, PrintingHandler())()\n"
        "except KeyError: pass\n",
    )

    assert ["initialize works", "success works", "7", "initialize None", "success None", "8"] == lines[:6]
    assert ["initialize fails", "exception 'bad' fails"] == lines[6:]


@pytest.mark.row(213, since=TODAY)
def test_error_handler_that_fails_at_success_fails_no_function(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        HANDLER + "PrintingHandler.raises = True\n"
        "try: errors.record(works, PrintingHandler())()\n"
        "except ValueError as error: print(error)\n",
    )

    assert ["initialize works", "success works", "no telemetry"] == lines


ENRICHED = """
import os
from {elastic}.multiprocessing import errors
class Knows(errors.ErrorHandler):
    fails = False
    def maybe_enrich_signal_failure_message(self, message, error_file):
        if self.fails: raise OSError("no logs")
        return message + " page fault"
errors.get_error_handler = Knows
failures = {0: errors.ProcessFailure(0, 70, -11, "nowhere"), 1: errors.ProcessFailure(1, 71, 3, "nowhere")}
text = errors.ChildFailedError("train", failures).format_msg()
print(text.count("SIGSEGV) received by PID 70 page fault"), text.count("page fault"))
Knows.fails = True
print("SIGSEGV) received by PID 70" in errors.ChildFailedError("train", failures).format_msg())
"""


@pytest.mark.row(214, since=TODAY)
def test_an_error_handler_adds_to_the_message_of_a_signal_and_may_fail(peer: Peer) -> None:
    assert ["1 1", "True"] == printed_lines(peer, ENRICHED)


@pytest.mark.row(215, since=TODAY)
def test_a_dynamic_handler_knows_the_time_between_repeated_writes(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "from datetime import timedelta\n"
        "from torch.distributed import HashStore\n"
        "from {elastic}.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend\n"
        "from {elastic}.rendezvous import dynamic_rendezvous as dynamic\n"
        "store = HashStore()\n"
        "made = lambda **more: dynamic.DynamicRendezvousHandler.from_backend(\n"
        "    'job7', store, C10dRendezvousBackend(store, 'job7'), 1, 2, 'localhost', **more)\n"
        "print(made().settings.cas_backoff_max_seconds)\n"
        "print(made(cas_backoff_max_seconds=1.5).settings.cas_backoff_max_seconds)\n"
        "for bad in (-1.0, float('inf')):\n"
        "    try: made(cas_backoff_max_seconds=bad)\n"
        "    except ValueError as error: print('cas_backoff_max_seconds' in str(error))\n",
    )

    assert ["0.0", "1.5", "True", "True"] == lines


@pytest.mark.row(216, since=TODAY)
def test_the_helpers_of_the_binding_speak_of_any_device(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "import inspect\n"
        "from {numa} import binding\n"
        "for end in ('wrap_command_args_with_numa_binding', 'wrap_with_numa_binding', "
        "'apply_numa_binding_to_current_process'):\n"
        "    print('device_index' in inspect.signature(getattr(binding, '_maybe_' + end)).parameters)\n",
    )

    assert ["True"] * 3 == lines


@pytest.mark.row(217, since=TODAY)
def test_free_port_is_free_on_all_addresses_and_does_not_listen(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "import socket\n"
        "from {elastic}.utils.distributed import get_free_port, get_socket_with_port\n"
        "with get_socket_with_port() as bound:\n"
        "    port = bound.getsockname()[1]\n"
        "    for address in ('127.0.0.1', '127.0.0.2'):\n"
        "        with socket.socket() as other:\n"
        "            try: other.bind((address, port))\n"
        "            except OSError: print('taken')\n"
        "        try: socket.create_connection((address, port))\n"
        "        except ConnectionRefusedError: print('refused')\n"
        "with socket.create_server(('', get_free_port())): print('bound')\n",
    )

    assert ["taken", "refused", "taken", "refused", "bound"] == lines


@pytest.mark.row(218, improvement=True)
def test_a_port_that_was_taken_meanwhile_is_worth_another_one(peer: Peer) -> None:
    """torch 2.15 tries again only where the port is given, and so the same one."""
    lines = printed_lines(
        peer,
        "import torch.distributed as dist\n"
        "plain, attempts = dist.TCPStore, []\n"
        "def taken_once(*args, **options):\n"
        "    attempts.append(args)\n"
        "    if len(attempts) == 1: raise dist.DistNetworkError('EADDRINUSE, message: address already in use')\n"
        "    return plain(*args, **options)\n"
        "dist.TCPStore = taken_once\n"
        "from {elastic}.utils.distributed import create_c10d_store\n"
        "print(create_c10d_store(True, 'localhost', wait_for_workers=False).port > 0, len(attempts))\n",
    )

    assert ["True 2"] == lines


@pytest.mark.row(219, since=TODAY)
def test_a_handler_that_fails_at_its_end_costs_no_result(peer: Peer) -> None:
    code = """
from torch.distributed import HashStore
from {distributed}.launcher.api import LaunchConfig, elastic_launch
from {elastic}.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
class Mine(RendezvousHandler):
    use_agent_store = False
    def get_backend(self): return "mine"
    def next_rendezvous(self):
        store = HashStore()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "localhost"))
    def is_closed(self): return False
    def set_closed(self): pass
    def num_nodes_waiting(self): return 0
    def get_run_id(self): return "job7"
    def shutdown(self): raise KeyError("not today")
rendezvous_handler_registry.register("mine", lambda params: Mine())
def work(): return 7
if __name__ == "__main__":
    config = LaunchConfig(1, 1, 1, run_id="job7", rdzv_backend="mine", rdzv_endpoint="x", start_method="fork")
    print(elastic_launch(config, work)())
"""

    assert ["{0: 7}"] == printed_lines(peer, code)


STARTED = """
import os, signal, sys, time
from {elastic}.multiprocessing import DefaultLogsSpecs, start_processes
def interrupted(): os.kill(os.getpid(), signal.SIGINT); time.sleep(30)
def start(entrypoint, args, envs):
    return start_processes("t", entrypoint, args, envs, DefaultLogsSpecs("logs"), start_method="spawn")
"""


@pytest.mark.row(220, since=TODAY)
def test_an_interrupted_child_has_failed_and_ends_with_130(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        STARTED + "if __name__ == '__main__':\n"
        "    result = start(interrupted, {0: ()}, {0: {}}).wait(60)\n"
        "    print({rank: each.exitcode for rank, each in result.failures.items()})\n",
    )

    assert ["{0: 130}"] == lines


@pytest.mark.row(221)
@pytest.mark.parametrize("entrypoint", ["interrupted", "'true'"])
def test_no_arguments_at_all_start_nothing_and_have_an_empty_result(peer: Peer, entrypoint: str) -> None:
    lines = printed_lines(
        peer,
        STARTED + "if __name__ == '__main__':\n"
        f"    result = start({entrypoint}, {{}}, {{}}).wait(60)\n"
        "    print(result.is_failed(), result.return_values, result.failures, result.stdouts)\n",
    )

    assert ["False {} {} {}"] == lines


@pytest.mark.row(222)
@pytest.mark.parametrize(
    "fields",
    [
        "run_id='', max_nodes=2",
        "run_id=None",
        "metrics_cfg={'a': 'b'}",
        "metrics_cfg=None",
        "local_addr=''",
        "rdzv_configs={'is_host': True, 'ssl_cert': 'nowhere', 'more': 3}",
        "virtual_local_rank=0",
        "nproc_per_node=True",
        "rdzv_timeout=-7",
    ],
)
def test_fields_that_torch_takes_stop_no_job(peer: Peer, fields: str) -> None:
    code = f"""
import sys
from {{distributed}}.launcher.api import LaunchConfig, elastic_launch
def work(): return 7
if __name__ == "__main__":
    given = dict(min_nodes=1, max_nodes=1, nproc_per_node=1, run_id="job7", rdzv_backend="c10d", start_method="fork")
    given.update(rdzv_endpoint="localhost:" + sys.argv[1], {fields})
    given.setdefault("rdzv_configs", {{}}).update(last_call_timeout=1)
    print(elastic_launch(LaunchConfig(**given), work)())
"""

    assert ["{0: 7}"] == printed_lines(peer, code, str(free_port()))


@pytest.mark.row(223)
def test_a_timer_server_that_was_stopped_can_be_started_again(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "import multiprocessing\n"
        "from {elastic}.timer import LocalTimerServer\n"
        "server = LocalTimerServer(multiprocessing.Queue(), max_interval=0.1)\n"
        "for _ in range(2):\n"
        "    server.start()\n"
        "    server.stop()\n"
        "print('went on')\n",
    )

    assert ["went on"] == lines


@pytest.mark.row(224)
def test_the_time_of_a_failure_is_in_whole_seconds(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "import json\n"
        "from {elastic}.multiprocessing.errors import ProcessFailure\n"
        "with open('error.json', 'w') as file:\n"
        "    json.dump({'message': {'message': 'bad', 'extraInfo': {'timestamp': '1700000000'}}}, file)\n"
        "print(ProcessFailure(0, 7, 1, 'error.json').timestamp)\n"
        "print(str(ProcessFailure(0, 7, 1, 'nowhere').timestamp).isdecimal())\n",
    )

    assert ["1700000000", "True"] == lines


@pytest.mark.row(225)
def test_an_error_handler_turns_the_fault_handler_on(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "import faulthandler\n"
        "from {elastic}.multiprocessing.errors import get_error_handler\n"
        "print(faulthandler.is_enabled())\n"
        "get_error_handler().initialize()\n"
        "print(faulthandler.is_enabled())\n",
    )

    assert ["False", "True"] == lines


@pytest.mark.row(226)
def test_failed_workers_without_an_error_file_leave_none_in_the_launcher(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "import os\n"
        "from {elastic}.multiprocessing.errors import ChildFailedError, ProcessFailure, record\n"
        "os.environ['TORCHELASTIC_ERROR_FILE'] = 'mine.json'\n"
        "def fails(): raise ChildFailedError('train', {0: ProcessFailure(0, 7, 3, 'nowhere')})\n"
        "try: record(fails)()\n"
        "except ChildFailedError: print(os.path.exists('mine.json'))\n",
    )

    assert ["False"] == lines


@pytest.mark.row(227)
def test_start_takes_any_iterable_as_a_ranks_arguments(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        STARTED + "def adds(one, two): return one + two\n"
        "if __name__ == '__main__':\n"
        "    print(start(adds, {0: [1, 2], 1: 'ab'}, {0: {}, 1: {}}).wait(60).return_values)\n",
    )

    assert ["{0: 3, 1: 'ab'}"] == lines


@pytest.mark.row(228)
def test_environment_value_outside_the_choices_is_accepted(peer: Peer) -> None:
    lines = printed_lines(
        peer,
        "import argparse, os\n"
        "from {distributed}.argparse_util import env\n"
        "os.environ['PET_FOO'] = 'c'\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--foo', action=env, choices=['a', 'b'], default='a')\n"
        "print(parser.parse_args([]).foo)\n",
    )

    assert ["c"] == lines
