"""Hostfiles, filters, devices, core lists, environment files: everything decided before a process is started."""

import base64
import json
from pathlib import Path

import pytest
from dsx_launch import ResourceError
from dsx_launch.binding import cores_for, node_cores, parse_core_list, share_nodes, split_cores
from dsx_launch.devices import devices_for, visible_tokens
from dsx_launch.environment import exported, parse_env_file, read_env_files
from dsx_launch.host_rank import host_rank_from
from dsx_launch.options import parse
from dsx_launch.resources import apply_filters, decode_world, encode_world, limit, parse_hostfile, with_procs
from dsx_launch.runners.slurm import expand_nodelist

POOL = {"worker-0": ("0", "1", "2", "3"), "worker-1": ("0", "1")}


def test_hostfile_keeps_the_order_and_skips_comments():
    lines = ["# the big ones", "", "worker-1 slots=2  # half a machine", "  worker-0   slots = 4", "single"]
    assert parse_hostfile(lines) == {"worker-1": ("0", "1"), "worker-0": ("0", "1", "2", "3"), "single": ("0",)}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a slots=2", "a slots=4"], ["line 2", "'a'", "line 1"]),
        (["a slots=2", "b slots=two"], ["line 2", "got two"]),
        (["a slots=0"], ["line 1", "got 0"]),
        (["a slots=99999999999"], ["line 1", "got 99999999999"]),
        (["a slots=" + "9" * 5000], ["line 1", "got 99999"]),
        (["a slots=-1"], ["line 1"]),
        (["", "a 4"], ["line 2", "'a 4'"]),
        (["a slots=2 b slots=3"], ["line 1"]),
        (["-oProxyCommand=x slots=1"], ["line 1"]),
        (["# nothing"], ["no host"]),
    ],
)
def test_bad_hostfile_lines_are_named(lines, words):
    with pytest.raises(ResourceError) as caught:
        parse_hostfile(lines)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", POOL),
        ("worker-0@worker-1:0", "", {"worker-0": ("0", "1", "2", "3"), "worker-1": ("0",)}),
        ("worker-1:1,0", "", {"worker-1": ("0", "1")}),
        ("worker-0:1,1", "", {"worker-0": ("1",)}),
        ("worker-1@worker-0:3", "", {"worker-0": ("3",), "worker-1": ("0", "1")}),
        ("", "worker-1:0", {"worker-0": ("0", "1", "2", "3"), "worker-1": ("1",)}),
        ("", "worker-0", {"worker-1": ("0", "1")}),
        ("", "worker-1:0,1", {"worker-0": ("0", "1", "2", "3")}),
    ],
)
def test_filters(include, exclude, expected):
    assert apply_filters(POOL, include=include, exclude=exclude) == expected
    assert list(apply_filters(POOL, include=include, exclude=exclude)) == list(expected)


@pytest.mark.parametrize(
    ("include", "exclude", "word"),
    [
        ("worker-0", "worker-1", "exclude each other"),
        ("worker-9", "", "worker-9"),
        ("worker-1:2", "", "slot 2"),
        ("worker-1:", "", "empty slot"),
        ("worker-0@worker-0:1", "", "twice"),
        ("@worker-0", "", "no host name"),
        ("", "worker-0@worker-1", "no slot"),
    ],
)
def test_bad_filters_are_named(include, exclude, word):
    with pytest.raises(ResourceError, match=word):
        apply_filters(POOL, include=include, exclude=exclude)


def test_limits_take_the_first_hosts_and_slots():
    assert limit(POOL, nodes=1, per_host=2) == {"worker-0": ("0", "1")}
    assert with_procs(POOL, 3) == {"worker-0": ("0", "1", "2"), "worker-1": ("0", "1", "2")}
    with pytest.raises(ResourceError, match="--num_nodes 3"):
        limit(POOL, nodes=3)
    with pytest.raises(ResourceError, match="worker-1"):
        limit(POOL, per_host=3)


def test_world_info_is_base64_json_and_comes_back():
    pool = {"a": ("0", "1"), "b": ("GPU-1f0b", "MIG-77")}
    assert json.loads(base64.urlsafe_b64decode(encode_world(pool))) == {"a": [0, 1], "b": ["GPU-1f0b", "MIG-77"]}
    assert decode_world(encode_world(pool)) == pool
    for bad in (
        "%%%",
        base64.urlsafe_b64encode(b"[1]").decode(),
        base64.urlsafe_b64encode(b"{}").decode(),
        "bm90IGpzb24=",
    ):
        with pytest.raises(ResourceError, match="--world_info"):
            decode_world(bad)


def test_device_names_may_be_uuids():
    assert visible_tokens("GPU-8932f937-d72c, MIG-ab,3") == ("GPU-8932f937-d72c", "MIG-ab", "3")
    assert visible_tokens("0,-1,2") == ("0",)
    assert visible_tokens("") == ()
    assert visible_tokens(None) is None


def test_slots_select_among_the_devices_a_host_may_use():
    assert devices_for(("0", "1"), {}, 8) == ("0", "1")
    assert devices_for(("0", "2"), {"CUDA_VISIBLE_DEVICES": "4,5,GPU-x"}, 3) == ("4", "GPU-x")
    assert devices_for(("GPU-x",), {"CUDA_VISIBLE_DEVICES": "4,5,GPU-x"}, 3) == ("GPU-x",)
    assert devices_for(("0", "1"), {}, 0) is None
    with pytest.raises(ResourceError, match="slot 2"):
        devices_for(("0", "2"), {"CUDA_VISIBLE_DEVICES": "4,5"}, 2)


def test_cores():
    assert parse_core_list("0-3,8") == (0, 1, 2, 3, 8)
    assert split_cores((0, 1, 2, 3, 8), 2) == ((0, 1), (2, 3))
    for bad in ("3-1", "a", "0-", "1,1", "", "0-99999999999", "9" * 5000):
        with pytest.raises(ResourceError, match="--bind_core_list"):
            parse_core_list(bad)
    with pytest.raises(ResourceError, match="only 1 core"):
        split_cores((5,), 2)


def system_of(folder, *lists):
    """A stand-in for the kernel's folder of NUMA nodes."""
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    (folder / "possible").write_text("0-1\n")
    return folder


def test_a_rank_gets_cores_of_one_node(tmp_path):
    """Numbers of cores alternate between the nodes on some machines; on others hyperthreads come behind all cores."""
    alternating = system_of(tmp_path, "0,2,4,6", "1,3,5,7", "")  # the last node has memory only
    assert node_cores(range(8), alternating) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert share_nodes(node_cores(range(8), alternating), 2) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert share_nodes(node_cores(range(8), alternating), 4) == ((0, 2), (4, 6), (1, 3), (5, 7))
    # of unequal parts of the nodes each rank gets as many cores, and none of two nodes
    assert share_nodes(node_cores([0, 1, 2, 3, 4, 5], alternating), 2) == ((0, 2, 4), (1, 3, 5))
    assert share_nodes(node_cores([0, 2, 4, 6, 1], alternating), 2) == ((0,), (1,))
    # ranks that are no multiple of the nodes are given the cores node by node
    assert share_nodes(node_cores(range(8), alternating), 3) == ((0, 2), (4, 6), (1, 3))
    with pytest.raises(ResourceError, match="only 2 core"):
        share_nodes(node_cores([0, 1], alternating), 3)


def test_cores_on_nodes_that_nobody_lists(tmp_path):
    assert node_cores([3, 1], tmp_path / "nothing") == [(1, 3)]  # no NUMA in the kernel
    assert node_cores([0, 1, 9], system_of(tmp_path, "0-3", "4-7")) == [(0, 1), (9,)]


def test_a_list_of_cores_keeps_its_order(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert cores_for(2, bind=True, core_list="3,1,0,2") == ((3, 1), (0, 2))
    assert cores_for(2, bind=False, core_list="") == ()


def test_exports_never_replace_what_the_command_says(caplog):
    environ = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/mine",
        "HOME": "/h",
        "UCX_TLS": "rc",
        "MV2_X": "1",
        "MLFLOW_Y": "2",
        "PATH": "/bin",
    }
    files = {"NCCL_DEBUG": "WARN", "HF_HOME": "/data", "PATH": "/cluster/bin"}
    chosen = exported(environ, files)
    assert chosen == {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/mine",
        "UCX_TLS": "rc",
        "MV2_X": "1",
        "MLFLOW_Y": "2",
        "HF_HOME": "/data",
        "PATH": "/cluster/bin",
    }
    assert "NCCL_DEBUG" in caplog.text


def test_environment_files_of_home_and_folder(tmp_path: Path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / ".deepspeed_env").write_text("A=home\nB=home\n")
    (here / ".dsx_env").write_text("# comment\nA=here=1\nexport C='two words'\n")
    assert read_env_files({}, home=home, here=here) == {"A": "here=1", "B": "home", "C": "two words"}
    own = tmp_path / "own"
    own.write_text("Z=1\n")
    assert read_env_files({"DS_ENV_FILE": str(own)}, home=home, here=here) == {"Z": "1"}
    with pytest.raises(ResourceError, match="no such file"):
        read_env_files({"DS_ENV_FILE": str(tmp_path / "gone")}, home=home, here=here)
    with pytest.raises(ResourceError, match=r"f, line 2"):
        parse_env_file(["A=1", "not a setting"], name="f")


def test_slurm_node_lists():
    assert expand_nodelist("gpu[01-03,7],login") == ("gpu01", "gpu02", "gpu03", "gpu7", "login")
    assert expand_nodelist("r[1-2]n[1-2]") == ("r1n1", "r1n2", "r2n1", "r2n2")
    with pytest.raises(ResourceError, match="no host"):
        expand_nodelist("")


def test_a_host_finds_its_place():
    hosts = ("b", "a")
    assert host_rank_from({"SLURMD_NODENAME": "a", "SLURM_NODEID": "0"}, hosts, "slurm") == 1
    assert host_rank_from({"OMPI_COMM_WORLD_RANK": "1", "SLURMD_NODENAME": "b"}, hosts, "mpi") == 1
    assert host_rank_from({"PMI_RANK": "0"}, hosts) == 0
    with pytest.raises(ResourceError, match="--node_rank"):
        host_rank_from({}, hosts)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--include", "a", "--exclude", "b", "x.py"], "exclude each other"),
        (["--include", "a", "--num_gpus", "1", "x.py"], "exclude each other"),
        (["--num_gpus", "1", "--num_procs", "1", "x.py"], "got both"),
        (["--module", "--no_python", "x"], "got both"),
        (["--num_procs", "0", "x.py"], "at least 1"),
        (["--master_port", "70000", "x.py"], "65535"),
        (["--no_ssh", "x.py"], "--master_addr"),
        (["--node_rank", "1", "x.py"], "--no_ssh"),
    ],
)
def test_options_that_contradict_each_other(argv, word):
    with pytest.raises(ResourceError, match=word):
        parse(argv)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--min_elastic_nodes", "1"], "needs --elastic_training"),
        (["--max_elastic_nodes", "2"], "needs --elastic_training"),
        (["--elastic_training", "--min_elastic_nodes", "3", "--max_elastic_nodes", "2"], "exchange them"),
        (["--elastic_training", "--min_elastic_nodes", "0"], "at least 1"),
        (["--elastic_training", "--launcher", "openmpi"], "ends all hosts when one is lost"),
        (["--elastic_training", "--no_ssh", "--master_addr", "a", "--node_rank", "1"], "leave --node_rank out"),
        (["--restarts", "-1"], "0 or more"),
    ],
)
def test_elastic_options_that_mean_nothing(argv, word):
    with pytest.raises(ResourceError, match=word):
        parse([*argv, "x.py"])


def test_everything_after_the_script_belongs_to_the_script():
    options = parse(["--num-procs", "2", "train.py", "--num_gpus", "8", "--", "-x", "--help"])
    assert (options.num_procs, options.num_gpus, options.script) == (2, None, "train.py")
    assert options.script_args == ("--num_gpus", "8", "--", "-x", "--help")
    assert parse(["--", "train.py", "--"]).script_args == ("--",)


def test_minus_one_is_as_if_not_given():
    options = parse(["--num_gpus", "-1", "--num_nodes=-1", "--node_rank", "-1", "--include", "a", "x.py"])
    assert (options.num_gpus, options.num_nodes, options.node_rank) == (None, None, None)
    with pytest.raises(ResourceError, match="--num_gpus -2"):
        parse(["--num_gpus", "-2", "x.py"])
