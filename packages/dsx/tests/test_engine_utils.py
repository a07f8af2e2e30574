"""Logging by rank, memory lines, construction on a device, and an import that loads and does nothing."""

import logging
import subprocess
import sys

import pytest
import torch
from dsx.utils import OnDevice, enable_console, instrument_w_nvtx, log_dist, logger, see_memory_usage, set_log_level


@pytest.fixture(autouse=True)
def quiet_logger():
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_log_dist_writes_on_the_chosen_ranks(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="dsx")
    monkeypatch.setenv("RANK", "2")
    log_dist("not here")
    log_dist("here", ranks=[2])
    log_dist("everywhere", ranks=[-1], level=logging.WARNING)
    assert [(r.getMessage(), r.levelname) for r in caplog.records] == [
        ("[rank 2] here", "INFO"),
        ("[rank 2] everywhere", "WARNING"),
    ]


def test_levels_by_name():
    set_log_level("Warning")
    assert logger.level == logging.WARNING
    set_log_level(logging.DEBUG)
    assert logger.level == logging.DEBUG
    with pytest.raises(ValueError, match="log level: got 'loud', expected one of debug, info"):
        set_log_level("loud")


def test_the_console_is_added_once_and_never_beside_handlers_of_the_application(capsys):
    root = logging.getLogger()
    kept, root.handlers[:] = list(root.handlers), []
    try:
        assert enable_console() and not enable_console()
        logger.warning("shown by the console")
        assert capsys.readouterr().err.count("shown by the console") == 1
        root.addHandler(logging.StreamHandler())  # as logging.basicConfig does
        logger.warning("shown by the application")
        assert capsys.readouterr().err.count("shown by the application") == 1
        root.handlers.clear()
        logger.handlers[:] = [logging.NullHandler()]
        root.addHandler(logging.NullHandler())
        assert not enable_console()
    finally:
        root.handlers[:] = kept


def test_memory_line_only_when_forced(caplog):
    caplog.set_level(logging.INFO, logger="dsx")
    assert see_memory_usage("quiet") is None and not caplog.records
    status = see_memory_usage("after build", force=True)
    assert status is not None and status.host_resident > 2**20 and 0 < status.host_percent <= 100
    assert "after build: MA 0.00 GB" in caplog.text


def test_models_are_built_on_the_device_and_in_the_dtype():
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(3, 3)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert torch.nn.Linear(3, 3).weight.dtype == torch.float32
    with OnDevice(dtype=torch.float16, device="meta", enabled=False):
        assert not torch.nn.Linear(3, 3).weight.is_meta
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        OnDevice(dtype=torch.int32)


def test_ranges_do_nothing_off_cuda():
    @instrument_w_nvtx
    def double(x):
        return 2 * x

    assert double(3) == 6 and double.__name__ == "double"


PROBE = """
import sys
seen = []
watched = {"subprocess.Popen", "os.system", "os.putenv", "os.unsetenv", "os.mkdir", "os.remove", "socket.connect"}
def hook(event, args):
    if event in watched or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
                            and "__pycache__" not in str(args[0])):
        seen.append((event, str(args[0])))
sys.addaudithook(hook)
import dsx
assert "torch" not in sys.modules and "pydantic" not in sys.modules, "import dsx loads nothing"
assert dsx.__version__ and "initialize" in dir(dsx)
import dsx.utils
assert "torch" not in sys.modules
import torch
seen.clear()
before = set(sys.modules)
dsx.initialize, dsx.verify, dsx.Engine
assert "pydantic" not in sys.modules, "pydantic comes with the first configuration"
print(seen)
"""


def test_importing_loads_and_does_nothing():
    command = [sys.executable, "-B", "-c", PROBE]  # no compiled files: the first import of a module writes one
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_attribute_errors():
    import dsx

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dsx.nothing
    for name in dsx.__all__:
        assert getattr(dsx, name) is not None


def test_what_scripts_import_from_utils_is_there():
    import dsx
    import dsx_zero
    from dsx import utils

    for name in utils.__all__:
        assert getattr(utils, name) is not None
    assert utils.RepeatingLoader is dsx.RepeatingLoader
    for name in ("safe_update_full_grad_vectorized", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"):
        assert getattr(utils, name) is getattr(dsx_zero, name)
