"""The shipped job configurations render valid scripts for their sites; wrong sections are refused by their keys."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path

import dask.config
import dask_jobqueue
import pytest

import dask_ferro as ff
from dask_ferro import config
from dask_ferro.elastic.options import elastic_options
from dask_ferro.local.foreground import scripts
from dask_ferro.slurm import job_config
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "jobqueue_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SLURM = [name for name in NAMES if name != "gadi-gpu"]


@pytest.fixture(autouse=True)
def at_the_site(tmp_path, monkeypatch):
    """Use a temporary folder, and restore Dask's configuration."""
    monkeypatch.chdir(tmp_path)
    saved = copy.deepcopy(dask.config.config)
    yield
    dask.config.config.clear()
    dask.config.config.update(saved)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a configuration with some text replaced, and uses it."""

    def write(*changes, kind="slurm-cpu"):
        text = (FOLDER / f"{kind}.yaml").read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return job_config.use(path)

    return write


# ---- the shipped ones --------------------------------------------------------------------------------------


def test_there_is_one_for_each_site_that_was_promised():
    assert NAMES == ["gadi-gpu", "local-test", "narval", "nibi", "slurm-cpu", "slurm-gpu"]
    assert sorted(job_config.shipped_configs()) == NAMES


RENDERED = {
    "local-test": ["-p cpu", "--cpus-per-task=1", "--mem=500M", "-t 00:10:00", "--signal=B:USR1@30"],
    "slurm-cpu": ["--cpus-per-task=8", "--mem=32G", "-t 01:00:00", "--signal=B:USR1@120"],
    "slurm-gpu": ["-p gpu", "--gres=gpu:1", "--cpus-per-task=8", "--mem=32G", "-t 01:00:00"],
    "narval": ["--gpus=a100:1", "--cpus-per-task=12", "--mem=124G", "-t 03:00:00"],
    "nibi": ["--gpus=h100:1", "--cpus-per-task=14", "--mem=250G", "-t 03:00:00"],
}  # fmt: skip
COMMANDS = {
    "local-test": "--nthreads 1 --memory-limit 500.00MiB --nanny --death-timeout 60 --local-directory /tmp/ferro-test"
    " --interface lo",
    "slurm-cpu": "--nthreads 4 --memory-limit 16.00GiB --nworkers 2 --nanny --death-timeout 120 --local-directory"
    " ${TMPDIR:-/tmp}",
    "slurm-gpu": "--nthreads 1 --memory-limit 32.00GiB --nanny --death-timeout 120 --local-directory ${TMPDIR:-/tmp}"
    " --resources GPU=1",
    "narval": "--nthreads 1 --memory-limit 124.00GiB --nanny --death-timeout 180 --local-directory $SCRATCH/dask-ferro"
    " --resources GPU=1",
    "nibi": "--nthreads 1 --memory-limit 250.00GiB --nanny --death-timeout 180 --local-directory $SCRATCH/dask-ferro"
    " --resources GPU=1",
}


@pytest.mark.parametrize("name", SLURM)
def test_it_renders_the_script_that_its_site_wants(name):
    job_config.use(name)
    (script,) = scripts().values()
    directives = [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")
    ]
    assert [wanted for wanted in RENDERED[name] if wanted not in directives] == []
    assert COMMANDS[name] in script
    assert "--preload-nanny dask_ferro.slurm.job_preload" in script
    assert "export FERRO_JOB_ENDS=" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False, timeout=300).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_it_is_dasks_own_configuration_as_well(name):
    """In ~/.config/dask it serves dask-jobqueue without us: the same directives, but for the job's name."""
    job_config.use(name)
    assert list(config.unknown_keys()) == []
    if name == "gadi-gpu":
        header = dask_jobqueue.pbs.PBSJob("tcp://127.0.0.1:8786", "worker").job_header
        for line in (
            "-q gpuvolta",
            "-l ncpus=12,ngpus=1,mem=95GB,jobfs=100GB",
            "-l walltime=02:00:00",
            "-l wd",
        ):
            assert f"#PBS {line}" in header.splitlines()
        return
    header = dask_jobqueue.slurm.SLURMJob("tcp://127.0.0.1:8786", "worker").job_header
    (ours,) = scripts().values()
    # The jobs' name, and with it that of their logs, is unique to a cluster of ours.
    named = re.compile("#SBATCH -[Jeo] ")
    wanted = [line for line in header.splitlines() if not named.match(line)]
    assert len(wanted) >= 4
    assert [line for line in wanted if line not in ours.splitlines()] == []


def test_the_pools_that_a_comment_shows_are_right(written):
    text = (FOLDER / "slurm-gpu.yaml").read_text(encoding="utf-8")
    block = re.search(r"^    # pools:\n(?:    #   .*\n)+", text, re.MULTILINE)[0]
    written((block, re.sub(r"(?m)^    # ", "    ", block)), kind="slurm-gpu")
    found = scripts()
    assert list(found) == ["default", "cpu"]
    assert "--gres" in found["default"]
    assert "--gres" not in found["cpu"]
    assert "#SBATCH -p cpu" in found["cpu"]


# ---- the section -------------------------------------------------------------------------------------------


def test_keywords_of_ours_stand_in_the_section_and_the_call_wins(written):
    written(
        (
            "    retire-before: 120",
            "    retire-before: 2m\n    grace: 7\n    pools: {gpu: {retire-before: 2m}}",
        )
    )
    assert "#SBATCH --signal=B:USR1@120" in scripts()["gpu"]
    assert "#SBATCH --signal=B:USR1@90" in scripts(retire_before=90)["default"]
    assert list(scripts(pools={"other": {"queue": "x"}})) == ["default", "other"]


def test_another_section_is_named_by_config_name(written):
    path = written()
    section = dask.config.get("jobqueue.slurm") | {"queue": "fast", "retire-before": 33}
    with dask.config.set({"jobqueue.mine": section}):
        script = scripts(config_name="mine")["default"]
    assert "#SBATCH -p fast" in script
    assert "#SBATCH --signal=B:USR1@33" in script
    assert path.name == "mine.yaml"


REFUSED = {
    "a misspelled key": ("    cores: 8", "    coers: 8",
        "configuration jobqueue.slurm: unknown coers; wanted some of account, "),
    "a key of nobody": ("    cores: 8", "    cores: 8\n    zzz: 1", "jobqueue.slurm: unknown zzz; wanted some of"),
    "a key of another batch system": ("    queue: null", "    queue: null\n    resource-spec: a", "resource_spec;"),
    "a walltime without quotes": ("'01:00:00'", "12:00:00", "got walltime=43200, wanted text such as '01:30:00'"),
    "no cores": ("    cores: 8", "    cores: 0", "got cores=0, wanted a whole number of at least 1"),
    "a name that squeue would split": ("    name: ferro", "    name: a,b", "got 'a,b', wanted letters, digits"),
    "a signal that is no time": ("before: 120", "before: soon", "got retire_before='soon', wanted a duration"),
    "a misspelled key of a pool": ("    retire-before: 120", "    pools: {gpu: {queu: gpu}}",
        "pool 'gpu': unknown queu; wanted some of account, "),
    "a pool that is none": ("    retire-before: 120", "    pools: {gpu: 3}", "pool 'gpu': got 3, wanted keywords"),
    "a misspelled bound": ("maximum: 32", "maximun: 32", "unknown key ferro.elastic.maximun, did you mean maximum?"),
    "a misspelled section": ("  elastic:", "  elastics:", "unknown key ferro.elastics, did you mean elastic?"),
    "what is not YAML": ("    cores: 8", "    cores: [", "mine.yaml' is malformed"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused(old, new, said, written):
    with pytest.raises(ff.InputError) as caught:
        written((old, new)) and scripts()
    assert said in str(caught.value)


# ---- where it is found -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            "narwal", "no job configuration 'narwal', did you mean narval?; shipped are gadi-gpu", id="a name"
        ),
        pytest.param("absent.yaml", "'absent.yaml': no such file", id="a file"),
    ],
)
def test_what_is_not_there_is_named(name, said):
    with pytest.raises(ff.InputError, match=re.escape(said)):
        job_config.use(name)


def test_an_installed_package_carries_them(tmp_path):
    """The wheel holds the folder inside the package: pyproject's force-include."""
    shutil.copytree(
        ROOT / "dask_ferro", tmp_path / "dask_ferro", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(FOLDER, tmp_path / "dask_ferro" / "jobqueue_configs")
    code = "from dask_ferro.slurm import job_config; print(job_config.use('narval'))"
    done = ran([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert Path(done.stdout.strip()) == tmp_path / "dask_ferro" / "jobqueue_configs" / "narval.yaml"


def test_the_maximum_is_of_the_configuration_where_a_call_has_none(written):
    written(("maximum: 32", "maximum: 3"))
    with dask.config.set({"ferro.elastic.minimum": 2}):
        options = elastic_options({"minimum": None})
        assert (options.minimum, options.maximum) == (2, 3)
        assert elastic_options({"maximum": 9}).maximum == 9
        with pytest.raises(ff.InputError, match="minimum=4, maximum=3"):
            elastic_options({"minimum": 4})
