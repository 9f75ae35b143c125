"""
Slurm as an engine: ``elastic_launch(config, train, on=Slurm(nodes=4, time="1:00:00"))``.

One call is one job of Slurm, whose script runs ``srun python -m elasticlib.remote._batch_node FOLDER``: one program on
each node. It reads the call from a folder that all nodes share, launches its node as ``elasticrun`` does in a step
(`elasticlib.engines.engine_context`: nodes, endpoint, id, notices, time limit, requeue), and writes the outcome of its
node to the folder. No connection leads from the job to the client, so the client may end: the job goes on, and
`Slurm.attach` waits for it in another program. `_batch_files` has the files, and the rules against those of strangers.

* Outside an allocation ``sbatch`` submits the script. Inside one (``salloc``, a batch script) the client runs the same
  script on its own machine, and ``srun`` makes a step of the allocation.
* A stop or an interrupt cancels the job: SIGTERM, so that ranks can save, then SIGKILL.
* The job's launchers requeue it, as ``elasticrun --requeue`` does. Names of files have the number of restarts: the
  results are those of the last run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from elasticlib.engines import (
    BatchOptions,
    SlurmValue,
    allocation_of,
    batch_script,
    check_nodes,
    name_of_job,
    output_options,
    submit_script,
)
from elasticlib.errors import ConfigError, StartError
from elasticlib.job import Job
from elasticlib.processes import make_private_folder
from elasticlib.remote._batch_files import (
    CALL,
    ERRORS,
    MARK,
    OUTPUT,
    SCRIPT,
    BatchFolder,
    Submission,
    SubmissionFacts,
    default_folder,
    link_of,
)
from elasticlib.remote._batch_launch import BatchLaunch
from elasticlib.spec import TOKEN_VARIABLE, LaunchConfig
from elasticlib.workers import parse_signals

_NODE = ("-u", "-m", "elasticlib.remote._batch_node")
_ATTACHED_GRACE = 30.0
_UNLIMITED = 10**9
_NOT_OF_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_PTY_PORT")
"""Variables of a worker and of a terminal, in which a launch takes no nodes from Slurm."""


class Slurm:
    """
    *nodes* nodes of a Slurm cluster, with one launcher on each: one call is one job.

    *time* is a time limit such as ``"1:00:00"``, or a number of minutes. *sbatch* has other options of ``sbatch``, such
    as ``{"gpus-per-node": 8, "account": "a1"}``. With *requeue* the job is requeued after a preemption, a time limit
    or a lost node: a number of times, or True. *folder* must be one that all nodes share (None:
    ``~/.elasticlib/slurm``): each call makes a folder there. *python* is the interpreter on the nodes (None: the path
    of this one).

    In a program that runs in an allocation, such as a batch script, the call is a step of it.
    """

    def __init__(
        self,
        nodes: int,
        time: str | int | None = None,
        partition: str | None = None,
        sbatch: Mapping[str, SlurmValue] | None = None,
        requeue: bool | int = False,
        folder: str | os.PathLike[str] | None = None,
        python: str | None = None,
    ) -> None:
        self._options = BatchOptions(nodes, time, partition, {} if sbatch is None else sbatch, requeue)
        self.folder = default_folder() if folder is None else os.path.abspath(os.path.expanduser(folder))
        output_options(self.folder)
        self.python = python or sys.executable

    def __repr__(self) -> str:
        return f"Slurm(nodes={self.nodes})"

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self._options.nodes

    def script(self, title: str = "train", folder: str = "FOLDER", *, is_step: bool = False) -> str:
        """Return the script of a call with this *title*, whose files are in *folder*."""
        requeue = _UNLIMITED if self._options.requeue is True else int(self._options.requeue)
        command = (self.python, *_NODE, folder, *(("--requeue", str(requeue)) if requeue else ()))
        options = (*self._options.lines(title), *output_options(folder))
        of_step = self._options.lines_of_step(os.path.basename(folder) if is_step else "")
        return batch_script(options, self.nodes, command, of_step, os.path.join(folder, MARK))

    def submit(self, title: str, call: bytes, config: LaunchConfig) -> Submission:
        """Submit a packed *call*. Raises `ConfigError` or `StartError`, with nothing left."""
        allocation = allocation_of(os.environ)
        if allocation:
            self._check_for_step(allocation)
        elif "clusters" not in self._options.more:
            check_nodes(self.nodes, self._options.partition)
        record = SubmissionFacts(self.nodes, title, config.raise_as, bool(allocation))
        token = config.token or os.environ.get(TOKEN_VARIABLE) or None
        try:
            make_private_folder(self.folder)
            folder = BatchFolder.made(self.folder, name_of_job(title), token, record)
        except OSError as error:
            raise ConfigError.of_setting("folder", f"{self.folder!r} cannot be written: {error.strerror}") from error

        try:
            folder.write(CALL, call)
            folder.write_text(SCRIPT, self.script(title, folder.path, is_step=bool(allocation)))
            return self._begun(folder, record, allocation)
        except BaseException as error:
            shutil.rmtree(folder.path, ignore_errors=True)
            if isinstance(error, OSError):
                raise StartError(f"the files of the call cannot be written: {error}") from error
            raise

    def _begun(self, folder: BatchFolder, record: SubmissionFacts, allocation: str) -> Submission:
        script = folder.file(SCRIPT)
        own = {name: value for name, value in os.environ.items() if name not in _NOT_OF_JOBS}
        environ = {**own, TOKEN_VARIABLE: folder.token}
        if allocation:
            submission = Submission(folder, record, allocation, _run_script(folder, environ))
        else:
            options = (*self._options.lines(record.title), *output_options(folder.path))
            submission = Submission(folder, record, submit_script(script, options, environ))
        submission.note()
        return submission

    def _check_for_step(self, allocation: str) -> None:
        """Raise `ConfigError` for options that a step in an allocation cannot have."""
        given = {
            "partition": self._options.partition,
            "sbatch": dict(self._options.more),
            "requeue": self._options.requeue,
        }
        for name, value in given.items():
            if value:
                raise ConfigError.of_setting(
                    name, f"{value!r} cannot be given here: this program runs in Slurm job {allocation}; leave it out"
                )

    @staticmethod
    def attach(job_id: int | str, folder: str | os.PathLike[str] | None = None) -> Job:
        """
        Return the `Job` of a call that another program has submitted, as Slurm's job *job_id*.

        *folder* is the folder of the call (None: the one that was noted in ``~/.elasticlib/slurm``). The files stay.
        Raises `ConfigError` without such a call.
        """
        number = str(job_id)
        if not number.isdecimal():
            raise ConfigError.of_setting("job_id", f"{job_id!r} must be the number of a job of Slurm")
        path = link_of(number) if folder is None else os.path.abspath(folder)
        if not os.path.exists(path):
            raise ConfigError.of_setting(
                "job_id",
                f"{number}: {path} does not exist: the program that submitted the call has its results, "
                f"or the folder is another one: attach({number}, folder)",
            )
        found, record = BatchFolder.found(os.path.realpath(path))
        found.check_number(number)
        submission = Submission(found, record, number, is_attached=True)
        signums = parse_signals(LaunchConfig().signals_to_handle)
        return Job(BatchLaunch(lambda: submission, record.title, _ATTACHED_GRACE, signums)).begin()


def _run_script(folder: BatchFolder, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Run the script in the allocation of this program. Raises `StartError`."""
    if shutil.which("srun") is None:
        raise StartError("srun is not installed on this machine: install Slurm's client programs")
    with open(folder.file(OUTPUT), "ab") as output, open(folder.file(ERRORS), "ab") as errors:
        # In a session of its own: Ctrl-C must reach this program alone, which cancels the step.
        return subprocess.Popen(
            ["bash", folder.file(SCRIPT)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environ,
            start_new_session=True,
        )
