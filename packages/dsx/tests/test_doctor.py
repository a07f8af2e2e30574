"""``dsx doctor``: it answers every question it can, shows the ones it cannot, and says by its exit code whether a
run can start.
"""

import json
import re

from dsx import doctor
from dsx.doctor import BROKEN, OK, WARNING, Finding, examine, main, render


def test_json_report_of_this_machine(capsys):
    code = main(["--json"])
    report = json.loads(capsys.readouterr().out)
    findings = {(one["topic"], one["name"]): one for one in report["findings"]}
    assert code == (0 if report["healthy"] else 1)
    assert not [one for one in report["findings"] if one["topic"] == "probes"], "a probe failed"
    assert "gloo" in findings["communication", "backends"]["value"]
    assert findings["packages", "dsx-zero"]["value"]
    assert (
        ("limits", "/dev/shm") in findings
        and ("disk", "io_uring") in findings
        and ("communication", "dsx (shared memory)") in findings
        and ("native code", "dsx-ops") in findings
        and ("sparse attention", "native") in findings
    )
    assert all(one["hint"] for one in report["findings"] if one["status"] != OK)


def boom() -> list[Finding]:
    raise OSError("no such thing")


def test_a_failing_probe_is_a_finding_and_the_rest_goes_on(capsys):
    found = examine([boom, lambda: [Finding("a", "b", "[c]", WARNING, "do this")]])
    assert (found[0].name, found[0].status) == ("boom", WARNING) and "no such thing" in found[0].value
    render(found)
    said = capsys.readouterr().out
    assert "OSError: no such thing" in said and "[c]" in said and "do this" in said and "2 warning(s)" in said


def test_what_a_run_needs_decides_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_VITAL", (boom,))
    assert examine([boom])[0].status == BROKEN
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("torch", "backends", "none", BROKEN, "x")])
    assert main([]) == 1
    assert "1 broken" in capsys.readouterr().out


def test_small_shared_memory_is_a_warning(monkeypatch):
    class Usage:
        total, free = 64 * 2**20, 2**20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage)
    (found,) = doctor.shared_memory()
    assert found.status == WARNING and "--shm-size" in found.hint and found.value == "1 of 64 MiB free"


def test_a_missing_package_is_named(monkeypatch):
    def version(name: str) -> str:
        if name == "dsx-zero":
            raise doctor.metadata.PackageNotFoundError(name)
        return "1.0.1" if name == "dsx-ops" else "1.0"

    monkeypatch.setattr(doctor.metadata, "version", version)
    found = {one.name: one for one in doctor.packages()}
    assert found["dsx-zero"].status == BROKEN and "pip install --no-deps ./packages/dsx-zero" in found["dsx-zero"].hint
    assert found["dsx-ops"].status == BROKEN  # initialize refuses it
    assert found["dsx-comm"].status == OK


def test_backends_of_sparse_attention_are_told_with_their_reasons():
    import dsx_sparse_attn

    missing = dsx_sparse_attn.native_status()["reason"]  # where the package was built without a compiler
    with dsx_sparse_attn.reference_only():
        found = {one.name: one for one in doctor.sparse_attention()}
    assert found["native"].status == WARNING and found["native"].hint
    assert (missing or "reference_only") in found["native"].value
    assert found["torch"].value == "yes" and found["torch"].status == OK and set(found) >= {"triton", "flex"}


def test_every_package_that_dsx_needs_is_looked_at():
    from importlib.metadata import requires

    lines = [line for line in requires("dsx") or () if line.startswith("dsx-") and "extra ==" not in line]
    needed = {re.split(r"[<>=!~\[ ]", line)[0] for line in lines}
    assert {finding.name for finding in doctor.packages()} == {"dsx", *needed}


def test_the_native_part_of_every_package_is_told_with_the_reason_why_it_is_missing(monkeypatch):
    import dsx_nvme

    names = ["dsx-ops", "dsx-comm", "dsx-nvme", "dsx-sparse-attn"]
    assert [one.name for one in doctor.native_code()][:4] == names
    gone = {"native": False, "reason": "no compiler was found", "engines": {"io_uring": "not built", "threads": ""}}
    monkeypatch.setattr(dsx_nvme, "native_status", lambda: gone)
    found = {one.name: one for one in doctor.native_code()}
    assert "no compiler was found" in found["dsx-nvme"].value and found["dsx-nvme"].status == WARNING
    engines = {one.name: one.value for one in doctor.disk_engines()}
    assert engines == {"io_uring": "no: not built", "threads": "yes"}


def test_the_shared_memory_group_is_told_with_the_reason_why_it_is_missing(monkeypatch):
    import dsx_comm

    monkeypatch.setattr(dsx_comm, "native_status", lambda: {"native": False, "reason": "built without native code"})
    monkeypatch.setattr(dsx_comm.compressed, "codec_status", lambda: {"native": False, "reason": "no dsx-ops"})
    shared, kernels = doctor.transports()
    assert "built without native code" in shared.value and shared.status == WARNING and "gloo" in shared.hint
    assert "no dsx-ops" in kernels.value and kernels.status == WARNING
