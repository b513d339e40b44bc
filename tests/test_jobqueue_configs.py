"""The shipped job configurations render valid scripts for their sites; incomplete and misspelled ones are refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from inspect import Parameter, signature
from pathlib import Path

import dask.config
import dask_jobqueue
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_ferro as ff
from dask_ferro import config
from dask_ferro.runtime.jobs import job_config, job_keys
from dask_ferro.runtime.pools.failures import limits
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "jobqueue_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "gadi-gpu")
SITE = {"SBATCH_ACCOUNT": "def-someuser"}


@pytest.fixture(autouse=True)
def at_the_site(tmp_path, monkeypatch):
    """Set the variables of the sites, and use a temporary folder."""
    for name, value in (SITE | {"SCRATCH": str(tmp_path / "scratch")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a complete configuration with some text replaced."""

    def write(*changes, kind="slurm-cpu"):
        text = (FOLDER / f"{kind}.yaml").read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(path):
    with pytest.raises(ff.ConfigError) as caught:
        job_config.load(path)
    return str(caught.value)


# ---- the shipped ones --------------------------------------------------------------------------------------


def test_there_is_one_for_each_site_that_was_promised():
    assert NAMES == ["local-test", "narval", "nibi", "slurm-cpu", "slurm-gpu"]
    assert sorted(job_config.shipped()) == ["gadi-gpu", *NAMES]


RENDERED = {
    "local-test": ["-p cpu", "--cpus-per-task=1", "--mem=500M", "-t 00:10:00", "--signal=B:USR1@30"],
    "slurm-cpu": ["--cpus-per-task=8", "--mem=32G", "-t 01:00:00", "--signal=B:USR1@120"],
    "slurm-gpu": ["-p gpu", "--gres=gpu:1", "--cpus-per-task=8", "--mem=32G", "-t 01:00:00"],
    "narval": ["-A def-someuser", "--gpus=a100:1", "--cpus-per-task=12", "--mem=124G", "-t 03:00:00"],
    "nibi": ["-A def-someuser", "--gpus=h100:1", "--cpus-per-task=14", "--mem=250G", "-t 03:00:00"],
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


@pytest.mark.parametrize("name", NAMES)
def test_it_renders_the_script_that_its_site_wants(name):
    (script,) = job_config.load(name).scripts().values()
    mark = "#SBATCH "
    directives = [line.removeprefix(mark) for line in script.splitlines() if line.startswith(mark)]
    assert [wanted for wanted in RENDERED[name] if wanted not in directives] == []
    assert COMMANDS[name] in script
    assert "--preload-nanny dask_ferro.runtime.jobs.job_preload" in script
    assert "export FERRO_JOB_ENDS=" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False, timeout=300).returncode == 0


@pytest.mark.parametrize(
    ("name", "folder"), [("narval", "{}/scratch/dask-ferro/logs"), ("slurm-cpu", "dask-logs")]
)
def test_logs_lie_where_all_nodes_see_them_and_a_script_alone_makes_no_folder(name, folder, tmp_path):
    (script,) = job_config.load(name).scripts().values()
    assert f"#SBATCH -o {folder.format(tmp_path)}/" in script
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_its_bounds_are_of_the_controller(name):
    config = job_config.load(name)
    assert config.elastic["minimum"] == 0
    assert 4 <= config.elastic["maximum"] <= 32
    assert config.elastic.get("max_pending", 1) <= 8


@pytest.mark.parametrize("name", NAMES)
def test_it_is_dasks_own_configuration_as_well(name):
    """Copied to ~/.config/dask it serves dask-jobqueue without us: the same directives, but for the job's name."""
    tree = yaml.safe_load(os.path.expandvars((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
    with dask.config.set(dask.config.merge(dask.config.config, tree)):
        assert config.strangers() == []
        header = dask_jobqueue.slurm.SLURMJob("tcp://127.0.0.1:8786", "worker").job_header
    (ours,) = job_config.load(name).scripts().values()
    # The jobs' name, and with it that of their logs, is unique to a cluster of ours.
    named = re.compile("#SBATCH -[Jeo] ")
    wanted = [line for line in header.splitlines() if not named.match(line)]
    assert len(wanted) >= 4
    assert [line for line in wanted if line not in ours.splitlines()] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_a_user_may_change_is_explained(name):
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert f"--config {name}" in "\n".join(lines)
    groups = re.split(r"\n\s*\n", "\n".join(lines))
    assert [group for group in groups if "#" not in group] == []


def test_the_pools_that_a_comment_shows_are_right(written):
    text = (FOLDER / "slurm-gpu.yaml").read_text(encoding="utf-8")
    block = re.search(r"^    # pools:\n(?:    #   .*\n)+", text, re.MULTILINE)[0]
    config = job_config.load(written((block, re.sub(r"(?m)^    # ", "    ", block)), kind="slurm-gpu"))
    scripts = config.scripts()
    assert list(scripts) == ["default", "cpu"]
    assert config.keywords["pools"]["cpu"]["maximum"] == 8
    assert "--gres" in scripts["default"]
    assert "--gres" not in scripts["cpu"]
    assert "#SBATCH -p cpu" in scripts["cpu"]


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(job_keys.REQUIRED))
def test_a_key_that_is_missing_is_named(key, written):
    text = (FOLDER / "slurm-cpu.yaml").read_text(encoding="utf-8")
    line = re.search(rf"^    {key}:.*\n", text, re.MULTILINE)[0]
    said = refused(written((line, "")))
    assert f"mine.yaml: key jobqueue.slurm.{key} is missing: " in said


REFUSED = {
    "a misspelled key": ("    cores: 8", "    coers: 8", "unknown key jobqueue.slurm.coers, did you mean cores?"),
    "a key of nobody": ("    cores: 8", "    cores: 8\n    zzz: 1", "unknown key jobqueue.slurm.zzz; wanted some of"),
    "a key of another batch system": ("    queue: null", "    queue: null\n    resource-spec: a", "resource-spec"),
    "a key of old": ("job-extra-directives:", "job-extra:", "job-extra is now called job-extra-directives"),
    "a key twice": ("    cores: 8", "    cores: 8\n    cores: 4", "cores stands twice"),
    "a walltime without quotes": ("'01:00:00'", "12:00:00", "walltime: got 43200, wanted text such as '01:30:00'"),
    "a walltime that is none": ("'01:00:00'", "'1h'", "walltime: got '1h'"),
    "no walltime": ("'01:00:00'", "null", "walltime: got null"),
    "a queue that YAML reads as true": ("    queue: null", "    queue: on", "queue: got True, wanted text in quotes"),
    "no cores": ("    cores: 8", "    cores: 0", "cores: got 0, wanted a whole number of at least 1"),
    "cores that do not divide": ("processes: 2", "processes: 3", "cores: got 8 for processes: 3, wanted a multiple"),
    "memory that is no size": ("32GiB", "plenty", "memory: got 'plenty', wanted a size such as 32GiB"),
    "one directive where a list belongs": ("directives: []", "directives: -G 1", "got '-G 1', wanted a list of text"),
    "a name that squeue would split": ("    name: ferro", "    name: a,b",
        "jobqueue.slurm.name: got 'a,b', wanted letters, digits"),
    "a name of a variable that is not set": ("    name: ferro", "    name: $NOBODY-dask",
        "environment variable NOBODY is not set"),
    "a signal that is no time": ("ahead: 120", "ahead: soon", "signal-ahead: got 'soon', wanted a duration"),
    "a signal at no time": ("ahead: 120", "ahead: ''", "signal-ahead: got '', wanted a duration"),
    "a misspelled option of the scheduler": ("dashboard_address", "dashboard_adress", "mean dashboard_address?"),
    "an option of the scheduler that is no name": ("dashboard_address", "8786", "scheduler-options.8786; wanted some"),
    "a misspelled bound": ("maximum: 32", "maximun: 32", "ferro.elastic.maximun, did you mean maximum?"),
    "half a worker": ("maximum: 32", "maximum: 3.5", "maximum: got 3.5, wanted a whole number of workers"),
    "bounds that cross": ("minimum: 0", "minimum: 40", "minimum=40, maximum=32"),
    "a controller's value of no meaning": ("max-pending: 8", "efficiency: 7",
        "elastic.efficiency: got 7, wanted a number above 0"),
    "a limit of failures that is none": ("max-pending: 8", "failures: 0",
        "configuration ferro.elastic.failures: got 0, wanted a whole number of at least 1"),
    "a window of failures that is none": ("max-pending: 8", "failures-window: ''",
        "configuration ferro.elastic.failures-window: got '', wanted a duration"),
    "a share of memory that is none": ("max-pending: 8", "copy-share: 2",
        "elastic.copy-share: got 2, wanted a number"),
    "an interval that is none": ("max-pending: 8", "interval: fast",
        "elastic.interval: got 'fast', wanted a duration"),
    "a variable that is not set": ("account: null", "account: $NOBODY", "environment variable NOBODY is not set"),
    "a section that nobody reads": ("ferro:\n", "distributed: {}\nferro:\n", "section distributed is not read from"),
    "a misspelled section": ("  elastic:", "  elastics:",
        "section ferro.elastics is not read from here, did you mean"),
    "a section of another system": ("  slurm:", "  slrum:", "below jobqueue stands slrum; wanted slurm"),
    "what is not YAML": ("    cores: 8", "    cores: [", "not YAML"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused(old, new, said, written):
    message = refused(written((old, new)))
    assert said in message
    assert "mine.yaml" in message


POOLS = {
    "a misspelled key": ("gpu: {queu: gpu}", "unknown key jobqueue.slurm.pools.gpu.queu, did you mean queue?"),
    "a misspelled key beside a pool that is none": ("cpu: 3, gpu: {queu: gpu}", "pools.gpu.queu, did you mean queue?"),
    "a key of the cluster": ("gpu: {name: other}", "unknown key jobqueue.slurm.pools.gpu.name"),
    "cores that no longer divide": ("gpu: {processes: 3}", "pools.gpu.cores: got 8 for processes: 3"),
    "a pool that is none": ("gpu: 3", "wanted a name for each further kind of job"),
    "a price below nothing": ("gpu: {cost: -1}", "pools.gpu.cost: got -1, wanted a number"),
}  # fmt: skip


@pytest.mark.parametrize(("pools", "said"), POOLS.values(), ids=POOLS)
def test_pools_are_checked_as_their_cluster_is(pools, said, written):
    assert said in refused(written(("    signal-ahead: 120", f"    pools: {{{pools}}}")))


def test_all_that_is_wrong_is_told_at_once(written):
    said = refused(
        written(("    cores: 8", "    coers: 8"), ("'01:00:00'", "90"), ("maximum: 32", "maximum: -1"))
    )
    assert [word for word in ("coers", "cores is missing", "got 90", "got -1") if word not in said] == []


@pytest.mark.parametrize("name", ["narval", "nibi"])
def test_who_pays_has_to_be_said(name, monkeypatch):
    monkeypatch.delenv("SBATCH_ACCOUNT")
    assert "environment variable SBATCH_ACCOUNT is not set; export SBATCH_ACCOUNT=..." in refused(name)


SECTIONS = {
    name: yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))["jobqueue"]["slurm"]
    for name in NAMES
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 9)
    | st.floats()
    | st.sampled_from(("", "$X", "8GiB", "1:2:3", "2 m")),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("gpu", "cores")), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_a_slip_in_any_key_is_refused_by_its_name(name, data):
    section = SECTIONS[name]
    key = data.draw(st.sampled_from(sorted(section)))
    at = data.draw(st.integers(0, len(key) - 1))
    slip = key[:at] + key[at + 1 :]
    told = list(job_keys.problems({slip if k == key else k: v for k, v in section.items()}))
    assert any(f"unknown key jobqueue.slurm.{slip}" in problem for problem in told)
    assert (key not in job_keys.REQUIRED) or any(f".{key} is missing" in problem for problem in told)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_any_value_is_either_refused_or_a_keyword(name, data):
    section = SECTIONS[name]
    known = sorted(job_keys.dask_jobqueue_keys() | job_keys.OURS)
    changed = section | data.draw(st.dictionaries(st.sampled_from(known), VALUES, min_size=1, max_size=3))
    if not list(job_keys.problems(changed)):
        assert job_keys.keywords(changed).keys() <= {k.replace("-", "_") for k in changed} | {"job_name"}


# ---- where it is found -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            "narwal", "no job configuration 'narwal', did you mean narval?; shipped are gadi-gpu", id="a name"
        ),
        pytest.param("absent.yaml", "'absent.yaml': no such file", id="a file"),
        pytest.param("./narval", "'./narval': no such file", id="a path"),
    ],
)
def test_what_is_not_there_is_named(name, said):
    message = refused(name)
    assert said in message or ("./" in name and "narval" in message)


def test_an_installed_package_carries_them(tmp_path):
    """The wheel holds the folder inside the package: pyproject's force-include."""
    shutil.copytree(
        ROOT / "dask_ferro", tmp_path / "dask_ferro", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(FOLDER, tmp_path / "dask_ferro" / "jobqueue_configs")
    code = "from dask_ferro.runtime.jobs import job_config; print(job_config.load('narval').path)"
    done = ran([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert Path(done.stdout.strip()) == tmp_path / "dask_ferro" / "jobqueue_configs" / "narval.yaml"


def test_the_keys_of_ours_are_those_of_the_class():
    own = {
        name.replace("_", "-")
        for name, parameter in signature(ff.SLURMCluster.__init__).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY
    }
    assert own == job_keys.OURS


def test_bounds_of_the_call_win_and_there_has_to_be_a_maximum(written):
    config = job_config.load(written(("    maximum: 32\n", "")))
    with pytest.raises(ff.ConfigError, match=r"ferro\.elastic\.maximum is missing"):
        config.bounded(minimum=1)
    assert dict(config.bounded(1, 3).elastic) == {"minimum": 1, "maximum": 3, "max_pending": 8}
    with pytest.raises(ff.ConfigError, match="at least 4 workers, but at most 3"):
        config.bounded(4, 3)


def test_settings_of_the_section_that_are_no_options_of_the_controller_are_set_with_the_cluster(written):
    config = job_config.load(written(("max-pending: 8", "failures: 5\n    copy_share: 0.5")))
    assert dict(config.settings) == {"ferro.elastic.failures": 5, "ferro.elastic.copy-share": 0.5}
    assert dict(config.elastic) == {"minimum": 0, "maximum": 32}
    with dask.config.set(config.settings | {"ferro.elastic.failures": 3}):  # which are taken back at its end
        with pytest.raises(ff.ConfigError, match="the cluster did not start"):
            config.cluster(interface="nosuch0")
        assert limits().row == 5
